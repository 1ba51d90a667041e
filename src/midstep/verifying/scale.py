"""Scale: whether the whole is the pieces, each times a number, and what those numbers are.

    G = sum over pieces of w_i g_i,   g_i the gradient of a piece as the loss gave it

is solved for w by least squares. If nothing is left over, rows do not meet, and the fault is a
number: w = 1 is a loss that sums; w_i = share of the piece in something is a mean over that
something; which one, is found by counting what is in the batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .subject import Gradient

__all__ = ["Weights", "countable", "is_close", "named_ratio", "solve"]

_CLOSE = 1e-4  # shares of rows and targets differ by more; least squares is right to less


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """How much each piece weighs in the whole.

    Attributes:
        values: One number for each piece.
        left_over: Length of what they do not explain, over that of the whole.
    """

    values: tuple[float, ...]
    left_over: float

    @property
    def sums(self) -> bool:
        """Whether the loss of the whole is the sum of those of its pieces."""
        return is_close(self.values, [1.0] * len(self.values))


def solve(whole: Gradient, pieces: Sequence[Gradient]) -> Weights | None:
    """Find the weights; None where pieces are so much alike that there is no telling.

    Args:
        whole: The gradient of the whole batch.
        pieces: Those of its microbatches.
    """
    columns = torch.stack([_flat(piece) for piece in pieces], dim=1)
    target = _flat(whole)
    length = float(target.norm())
    if not length:
        return None
    singular = torch.linalg.svdvals(columns)
    if not singular[-1] > 1e-6 * singular[0]:
        return None
    found = torch.linalg.lstsq(columns, target.unsqueeze(1)).solution.squeeze(1)
    rest = float((target - columns @ found).norm())
    return Weights(tuple(found.tolist()), rest / length)


def countable(batch: Any) -> dict[str, float]:
    """Count everything in a batch that a mean might be over, by a name for it.

    Args:
        batch: Any nesting of tensors.
    """
    found: dict[str, float] = {}
    for path, tensor in _leaves(batch, ""):
        name = f"`{path}`" if path else "the batch"
        found[f"entries of {name}"] = tensor.numel()
        if not tensor.is_complex():
            found[f"entries of {name} that are not 0"] = int((tensor != 0).sum())
            found[f"the sum of {name}"] = float(tensor.double().sum())
        if not tensor.is_floating_point() and not tensor.is_complex():
            found[f"entries of {name} that are not -100"] = int((tensor != -100).sum())
            if tensor.ndim > 1:
                shifted = int((tensor[..., 1:] != -100).sum())
                found[f"entries of {name} that are not -100, without the first of each row"] = (
                    shifted
                )
    return {name: number for name, number in found.items() if number > 0}


def is_close(found: Sequence[float], due: Sequence[float]) -> bool:
    """Whether two lists of weights are the same."""
    return all(
        math.isclose(a, b, rel_tol=_CLOSE, abs_tol=1e-9) for a, b in zip(found, due, strict=True)
    )


def shares(numbers: Sequence[float]) -> list[float]:
    """Divide by the sum."""
    total = math.fsum(numbers)
    return [number / total for number in numbers]


def named_ratio(ratio: float, known: Mapping[str, float]) -> str:
    """Spell a ratio with what it equals, such as `4.000 = number of microbatches`.

    Args:
        ratio: Accumulated over whole.
        known: Numbers it may be, by name.

    Example:
        >>> named_ratio(4.0, {"number of microbatches": 4.0})
        '4.000 = number of microbatches'
        >>> named_ratio(0.25, {"number of microbatches": 4.0})
        '0.2500 = 1 / number of microbatches'
    """
    words = f"{ratio:.4g}" if abs(ratio) >= 1e4 else f"{ratio:#.4g}"
    for name, number in known.items():
        if math.isclose(ratio, number, rel_tol=_CLOSE):
            return f"{words} = {name}"
        if number and math.isclose(ratio, 1 / number, rel_tol=_CLOSE):
            return f"{words} = 1 / {name}"
    return words


def _flat(gradient: Gradient) -> Tensor:
    return torch.cat(
        [(torch.view_as_real(g) if g.is_complex() else g).double().flatten() for g in gradient]
    )


def _leaves(batch: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        yield path, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(batch, (tuple, list)):
        for index, value in enumerate(batch):
            yield from _leaves(value, f"{path}[{index}]")
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            name = f"{path}.{field.name}" if path else field.name
            yield from _leaves(getattr(batch, field.name), name)
