"""Seeds: the number a backward starts with, in place of a loss that is scaled and divided.

    .grad += grad(loss_sum) * seed,   seed = scale / divisor,   true gradient = unit * .grad

Counted ahead, the divisor is the denominator itself and the unit undoes the scale alone. Streamed,
or for a loss in half precision, the divisor is a power of two, and the unit makes up for it
exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd import graph

from .errors import WindowError

__all__ = ["Seeds", "power_of_two", "run_backward"]

_WIDE = (torch.float32, torch.float64)


class Seeds:
    """The seeds of one window.

    Args:
        scale: What every loss is multiplied by in backward; a tensor of shape [] where only the
            device knows it yet.
        rank_factor: What undoes a mean over ranks; 1 where they add up.
        denominators: What each term's mean is over: known ahead, or growing.
        num_expected: Microbatches of a streamed window; None when its denominators are known.
        divisor: A divisor that was agreed on; None to find one.
        is_alone: Whether no other rank must find the same divisor.
    """

    __slots__ = (
        "_denominators",
        "_divisor",
        "_is_alone",
        "_num_expected",
        "_rank_factor",
        "_seeds",
        "scale",
    )

    def __init__(
        self,
        scale: float | Tensor,
        *,
        rank_factor: float,
        denominators: Mapping[str, float],
        num_expected: int | None,
        divisor: float | None,
        is_alone: bool,
    ) -> None:
        self.scale = scale
        self._rank_factor = rank_factor
        self._denominators = denominators
        self._num_expected = num_expected
        self._divisor = divisor
        self._is_alone = is_alone
        self._seeds: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def of(self, term: str, loss: Tensor, found: float) -> Tensor:
        """Give the seed of one loss: a tensor of its dtype on its device, made once a window.

        Args:
            term: Which mean it belongs to.
            loss: The loss sum. Shape [].
            found: What this microbatch counts.

        Raises:
            WindowError: A half-precision loss after a wider one, or on several ranks.
        """
        key = (term, loss.dtype, loss.device)
        seed = self._seeds.get(key)
        if seed is None:
            divisor = self._divisor_of(term, loss.dtype, found)
            value = self.scale * self._rank_factor / divisor
            if isinstance(value, Tensor):
                seed = value.to(loss.device, loss.dtype)
            else:
                seed = torch.full((), value, dtype=loss.dtype, device=loss.device)
            self._seeds[key] = seed
        return seed

    @property
    def unit(self) -> float | Tensor:
        """What `.grad` must be multiplied by to be the gradient of the mean loss, unscaled."""
        if self._divisor is None:
            return 1.0 / self.scale
        denominator = next(iter(self._denominators.values()))
        return self._divisor / denominator / self.scale

    def clear(self) -> None:
        """Let go of the tensors."""
        self._seeds.clear()

    def _divisor_of(self, term: str, dtype: torch.dtype, found: float) -> float:
        if self._divisor is not None:
            return self._divisor
        if self._num_expected is not None:
            self._divisor = power_of_two(found * self._num_expected)
            return self._divisor
        if dtype in _WIDE or len(self._denominators) > 1:
            return self._denominators[term]
        # 1/denominator in 8 or 11 bits would tilt the whole gradient by up to 0.4 %; a power of two
        # is exact there, and the rest of the division is exact at the step.
        if self._seeds or not self._is_alone:
            raise WindowError(
                f"A {dtype} loss "
                f"{'on several ranks' if not self._is_alone else 'after a wider one'}, whose seed "
                "all microbatches of the window must share. Return the loss of every microbatch in "
                "float32, as `ms.cross_entropy` does."
            )
        self._divisor = power_of_two(self._denominators[term])
        return self._divisor


# What `torch.autograd.backward` calls once it has looked at its arguments.
_engine_run_backward = getattr(graph, "_engine_run_backward", None)


def run_backward(losses: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
    """Run one backward from several losses of shape [], as `torch.autograd.backward` does.

    The public function compares shapes and dtypes of losses and seeds, which are right here by
    construction, for a fifth of the time of a small backward: 20 of 100 microseconds.
    """
    if _engine_run_backward is None:
        torch.autograd.backward(losses, seeds)
        return
    _engine_run_backward(
        tuple(losses),
        tuple(seeds),
        False,  # retain_graph
        False,  # create_graph
        (),  # inputs: all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )


def power_of_two(value: float) -> float:
    """Give the power of two nearest to a positive number, on the scale of exponents.

    Example:
        >>> power_of_two(1000.0)
        1024.0
    """
    return 2.0 ** round(math.log2(value))
