"""Windows: the microbatches of one update, and the numbers their losses are divided by.

    gradient = sum over ranks and microbatches of grad(loss_sum) / denominator

The window owns the denominator. Known ahead (*counted*), it goes into the backward as its seed, and
`.grad` holds the true gradient at once. Counted as it goes (*streamed*), the seed carries a
provisional power of two, so that sums stay at a sane magnitude, and what remains of the division is
one exact factor at the step. The loss that is logged is never divided before it is a mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .cutting import Cut
from .errors import WindowError
from .records import UpdateRecord
from .tally import Loss, Tally

__all__ = ["Driver", "Loss", "Window"]

Batch = TypeVar("Batch")
_WIDE = (torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True, slots=True)
class Driver:
    """What a window needs of the updater that made it.

    Attributes:
        step: Ends the window.
        gradients: Brings the true gradients into `.grad`.
        autocast: Opens the autocast of one forward; None where there is none.
        look: Whether every gradient is finite so far, asked after each backward; None for no look.
    """

    step: Callable[[Window[Any]], UpdateRecord]
    gradients: Callable[[Window[Any]], None]
    autocast: Callable[[], AbstractContextManager[Any]] | None = None
    look: Callable[[], bool] | None = None


class _Forward:
    """Autocast for one forward; notes that it was used. Costs nothing in float32."""

    __slots__ = ("_autocast", "_window")

    def __init__(self, window: Window[Any], autocast: AbstractContextManager[Any] | None) -> None:
        self._window = window
        self._autocast = autocast

    def __enter__(self) -> None:
        self._window.has_forward = True
        if self._autocast is not None:
            self._autocast.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._autocast is not None:
            self._autocast.__exit__(kind, error, trace)


class Window(Generic[Batch]):
    """The microbatches of one update. Made by `Updater.windows`; iterate, backward each, step once.

    A window begun and not stepped (an exception, a `break`) is dropped when the next begins: its
    gradients are cleared, nothing is stepped and no clock ticks.

    Attributes:
        scale: What every loss of this window is multiplied by in backward.
        index: Position of the current microbatch, from 0; -1 before the first.
        is_last: Whether the current microbatch is the window's last.
        ended: Whether it was stepped or dropped.
        has_forward: Whether the current microbatch has been in `forward()`.
        tally: Its counts and loss sums.

    Example:
        >>> import midstep as ms
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> for window in updater.windows([torch.ones(3, 2), torch.ones(1, 2)], size=2):
        ...     for x in window:
        ...         window.backward(model(x).sum(), count=len(x))
        ...     record = window.step()
        >>> record.denominators, model.weight.grad
        ({'loss': 4}, tensor([[1., 1.]]))
    """

    __slots__ = (
        "_cut",
        "_divisor",
        "_driver",
        "_first_bad",
        "_is_settled",
        "_num_backward",
        "_seeds",
        "ended",
        "has_forward",
        "index",
        "is_last",
        "scale",
        "tally",
    )

    def __init__(self, cut: Cut[Batch], driver: Driver, *, scale: float) -> None:
        self._cut = cut
        self._driver = driver
        self._divisor: float | None = None
        self._seeds: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._num_backward = 0
        self._first_bad: int | None = None
        self._is_settled = False
        self.tally = Tally(cut.counts)
        self.scale = scale
        self.index = -1
        self.is_last = False
        self.ended = False
        self.has_forward = False

    def __iter__(self) -> Iterator[Batch]:
        for batch, is_last in self._cut.pull:
            self.index += 1
            self.is_last = is_last
            self.has_forward = False
            yield batch

    @property
    def denominators(self) -> dict[str, float]:
        """What each term's mean is over: counted, of the whole window; streamed, so far."""
        return self.tally.denominators

    @property
    def num_microbatches(self) -> int:
        """Microbatches handed out so far."""
        return self.index + 1

    def forward(self) -> AbstractContextManager[None]:
        """Run the forward of the current microbatch in its precision.

        Leaving it out is allowed in float32 on one rank; elsewhere `backward` refuses, because the
        precision that was asked for would be lost without a word.

        Returns:
            A context for the forward and the loss, not for the backward.
        """
        autocast = self._driver.autocast
        return _Forward(self, None if autocast is None else autocast())

    def backward(
        self, loss: Loss | Mapping[str, Loss], *, count: float | Tensor | None = None
    ) -> None:
        """Add the gradient of the current microbatch.

            .grad += grad(loss_sum) * seed,   seed = scale / denominator

        No graph node is added and the loss is not divided. A microbatch that counts nothing is left
        out, so that a mean over nothing (0/0) goes nowhere.

        Args:
            loss: The loss *sum* of this microbatch: a tensor of shape [], a `LossSum`, or one of
                these per term.
            count: What it is a sum over, in a streamed window; a `LossSum` carries its own.

        Raises:
            WindowError: Not a scalar, no graph, no count, a second time for one microbatch, or
                outside `forward()` where that would lose the precision.
            CountMismatch: The loss carries another count than the window found.
        """
        if self.ended or self._is_settled or self.index < 0:
            raise self._misuse()
        if not self.has_forward and self._driver.autocast is not None:
            raise WindowError(
                "`window.backward()` without `with window.forward():` around this microbatch's "
                "forward, so it ran without the autocast that was asked for. Put the forward and "
                "the loss inside it."
            )
        if isinstance(loss, Mapping):
            self._backward_terms(loss)
        else:
            term = self.tally.only_term()
            loss_sum, found = self.tally.take(term, loss, count, self.index)
            if found:
                loss_sum.backward(self._seed(term, loss_sum, found))  # type: ignore[no-untyped-call]
        self._num_backward += 1
        look = self._driver.look
        if look is not None and self._first_bad is None and not look():
            self._first_bad = self.index

    def _backward_terms(self, losses: Mapping[str, Loss]) -> None:
        self.tally.check_terms(losses)
        live: list[Tensor] = []
        seeds: list[Tensor] = []
        for term, loss in losses.items():
            loss_sum, found = self.tally.take(term, loss, None, self.index)
            if found:
                live.append(loss_sum)
                seeds.append(self._seed(term, loss_sum, found))
        if live:
            torch.autograd.backward(live, seeds)  # one walk over what the terms share

    def step(self) -> UpdateRecord:
        """End the window: look, clip, step, tick, and say what happened.

        Returns:
            The record of this update, applied or skipped.

        Raises:
            WindowError: No backward ran, or a counted microbatch had none.
            EmptyWindow: Nothing was counted, and the policy is to raise.
            NonFiniteGradient: By policy; nothing was changed.
        """
        self._check_complete()
        return self._driver.step(self)

    def gradients_(self) -> None:
        """Bring the true gradient of the mean loss into every `.grad` before the step.

        For those who want to look at it or change it; the step goes on from what it finds there.
        Costs one pass over the gradients where a division or a loss scale is still open.

        Raises:
            WindowError: The window has ended, or a counted microbatch had no backward.
        """
        self._check_complete()
        self._driver.gradients(self)
        self._is_settled = True

    @property
    def unit(self) -> float:
        """What `.grad` must be multiplied by to be the gradient of the mean loss, unscaled."""
        if self._is_settled:
            return 1.0
        if self._divisor is None:
            return 1.0 / self.scale
        return self._divisor / next(iter(self.denominators.values())) / self.scale

    def first_nonfinite(self) -> int | None:
        """Find the first microbatch known to have brought inf or nan: by its loss, or by a look."""
        found = self.tally.first_nonfinite()
        return self._first_bad if found is None else found

    def again(self, microbatches: Sequence[Batch], look: Callable[[], bool]) -> Window[Batch]:
        """Make the same window once more, of the microbatches that were seen, to look at each."""
        last = len(microbatches) - 1
        pull = ((batch, index == last) for index, batch in enumerate(microbatches))
        cut = dataclasses.replace(self._cut, pull=pull)
        return Window(cut, dataclasses.replace(self._driver, look=look), scale=self.scale)

    def end(self) -> None:
        """Note that it was stepped or dropped, and let go of its microbatches."""
        self.ended = True
        self._cut.pull = iter(())
        self._seeds.clear()

    def _seed(self, term: str, loss: Tensor, found: float) -> Tensor:
        key = (term, loss.dtype, loss.device)
        seed = self._seeds.get(key)
        if seed is None:
            value = self.scale / self._divisor_of(term, loss.dtype, found)
            seed = torch.full((), value, dtype=loss.dtype, device=loss.device)
            self._seeds[key] = seed
        return seed

    def _divisor_of(self, term: str, dtype: torch.dtype, found: float) -> float:
        """What this loss is divided by in backward; what is missing is made up for at the step."""
        if self._divisor is not None:
            return self._divisor
        if self._cut.counts is None:
            self._divisor = _power_of_two(found * self._cut.size)
            return self._divisor
        if dtype in _WIDE or len(self.denominators) > 1:
            return self.denominators[term]
        # 1/denominator in 8 or 11 bits would tilt the whole gradient by up to 0.4 %; a power of two
        # is exact there, and the rest of the division is exact at the step.
        if self._seeds:
            raise WindowError(
                f"A {dtype} loss after a wider one in the same window. Return the loss of every "
                "microbatch in float32."
            )
        self._divisor = _power_of_two(self.denominators[term])
        return self._divisor

    def _check_complete(self) -> None:
        if self.ended:
            raise self._misuse()
        if self._num_backward == 0:
            raise WindowError(
                "`window.step()`: no backward ran in this window, so there is no gradient to step "
                "on. Iterate over the window and call `window.backward(loss_sum)` for each "
                "microbatch."
            )
        self.tally.check_complete()

    def _misuse(self) -> WindowError:
        if self.ended:
            return WindowError(
                "This window has ended (it was stepped, or dropped when another began). Take the "
                "next one from `updater.windows(...)`."
            )
        return WindowError(
            "`window.backward()` outside the loop over the window's microbatches, or after "
            "`gradients_()`, so it is not known which microbatch this is. Write "
            "`for batch in window:` around it."
        )


def _power_of_two(value: float) -> float:
    return 2.0 ** round(math.log2(value))
