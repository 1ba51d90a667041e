"""The subject of a check: a model, a batch, a loss and a count, run whole or piece by piece."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..batches import num_rows, take_rows
from ..cutting import Count
from ..losses import LossSum
from ..terms import checked_count, terms_of
from .borrowing import Borrowed, in_double

__all__ = ["Cut", "Gradient", "Piece", "Subject", "cuts_of", "gap", "norm", "norms"]

Gradient = list[Tensor]  # one for each parameter, dense; zeros where autograd gave none


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """One way to cut the batch.

    Attributes:
        name: What it is called.
        pieces: The rows of each microbatch.
    """

    name: str
    pieces: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(slots=True)
class Piece:
    """What one microbatch gave.

    Attributes:
        rows: Which rows it had.
        counts: What each term counts.
        carried: What the losses themselves say they are sums over, where they say it.
        losses: The loss sum of each term.
        gradients: Of each term's loss sum.
    """

    rows: tuple[int, ...]
    counts: dict[str, float]
    carried: dict[str, float]
    losses: dict[str, float]
    gradients: dict[str, Gradient]

    def over(self, denominators: Mapping[str, float]) -> Gradient:
        """Add up the terms, each divided by its denominator.

        A term that counts nothing is left out, as a window does.
        """
        live = [term for term, count in self.counts.items() if count]
        parts = [[g / denominators[term] for g in self.gradients[term]] for term in live]
        if not parts:
            return [torch.zeros_like(g) for g in next(iter(self.gradients.values()))]
        return [torch.stack(column).sum(dim=0) for column in zip(*parts, strict=True)]


class Subject:
    """Runs pieces of one batch, and gives their gradients.

    Args:
        lent: The model.
        batch: The whole of it.
        loss: `loss(model, microbatch)`: a tensor, a `LossSum`, or one of these per term.
        count: What the mean is over; None when the losses carry their counts.
        called: What the loss is given as the model.
        double: Give it the batch in float64.
    """

    def __init__(
        self,
        lent: Borrowed,
        batch: Any,
        loss: Callable[[Any, Any], Any],
        count: Count | None,
        *,
        called: Any,
        double: bool,
    ) -> None:
        self.lent = lent
        self.num_rows = num_rows(batch)
        self._batch = in_float64(batch) if double else batch
        self._counted = batch
        self._loss = loss
        self._count = count
        self._called = called

    def batch(self, rows: Sequence[int]) -> Any:
        """Copy some rows of the batch."""
        return take_rows(self._batch, rows)

    def counts(self, rows: Sequence[int]) -> dict[str, float] | None:
        """Count some rows; None when the losses carry their counts."""
        if self._count is None:
            return None
        return terms_of(self._count(take_rows(self._counted, rows)))

    def forward(self, rows: Sequence[int]) -> Any:
        """Compute the loss of some rows, and no gradient of it."""
        return self._loss(self._called, self.batch(rows))

    def run(
        self, rows: Sequence[int], mode: contextlib.AbstractContextManager[Any] | None = None
    ) -> Piece:
        """Compute loss and gradient of one microbatch.

        Args:
            rows: Which.
            mode: Active in forward and backward.

        Raises:
            TypeError: The loss is not what a window takes.
        """
        counts = self.counts(rows)
        batch = self.batch(rows)
        with contextlib.nullcontext() if mode is None else mode:
            sums, found, said = _terms(self._loss(self._called, batch), counts)
            gradients = {
                term: self._backward(loss_sum, keep=index < len(sums) - 1)
                for index, (term, loss_sum) in enumerate(sums.items())
            }
        return Piece(
            rows=tuple(rows),
            counts=found,
            carried=said,
            losses={term: float(loss_sum.detach()) for term, loss_sum in sums.items()},
            gradients=gradients,
        )

    def _backward(self, loss_sum: Tensor, *, keep: bool) -> Gradient:
        for parameter in self.lent.parameters:
            parameter.grad = None
        if loss_sum.requires_grad:
            torch.autograd.backward([loss_sum], retain_graph=keep)
        found = []
        for parameter in self.lent.parameters:
            grad = parameter.grad
            parameter.grad = None
            if grad is None:
                found.append(torch.zeros_like(parameter.detach()))
            else:
                found.append(grad.to_dense() if grad.is_sparse else grad)
        return found


def cuts_of(num: int) -> list[Cut]:
    """List the ways in which a batch of so many rows is cut.

    Args:
        num: Rows; at least 2.

    Example:
        >>> for cut in cuts_of(6):
        ...     print(cut.name, cut.pieces)
        halves ((0, 1, 2), (3, 4, 5))
        ones ((0,), (1,), (2,), (3,), (4,), (5,))
        uneven ((0,), (1, 2), (3, 4, 5))
        permuted ((2, 0), (5, 1), (4, 3))
    """
    rows = tuple(range(num))
    half = math.ceil(num / 2)
    cuts = [Cut("halves", (rows[:half], rows[half:])), Cut("ones", tuple((row,) for row in rows))]
    if num >= 8:
        step = math.ceil(num / 4)
        cuts.insert(1, Cut("quarters", tuple(rows[i : i + step] for i in range(0, num, step))))
    if num >= 3:
        edges = [0, 1, max(2, num // 3 + 1), num] if num > 3 else [0, 1, 3]
        uneven = tuple(rows[a:b] for a, b in itertools.pairwise(edges) if b > a)
        cuts.append(Cut("uneven", uneven))
        order = torch.randperm(num, generator=torch.Generator().manual_seed(num)).tolist()
        step = max(1, math.ceil(num / 3))
        cuts.append(Cut("permuted", tuple(tuple(order[i : i + step]) for i in range(0, num, step))))
    return cuts


def in_float64(batch: Any) -> Any:
    """Copy a batch with every real tensor of it in float64; anything else stays what it is."""
    return _mapped(batch, lambda t: in_double(t) if t.is_floating_point() else t)


def gap(one: Gradient, other: Gradient) -> Gradient:
    """Subtract."""
    return [a - b for a, b in zip(one, other, strict=True)]


def norms(gradient: Gradient) -> list[float]:
    """Give the length of each tensor."""
    return [float(torch.linalg.vector_norm(g.detach().to(_wide(g.dtype)))) for g in gradient]


def norm(gradient: Gradient) -> float:
    """Give the length of all tensors as one vector."""
    return math.hypot(*norms(gradient)) if gradient else 0.0


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _terms(
    loss: Any, counts: dict[str, float] | None
) -> tuple[dict[str, Tensor], dict[str, float], dict[str, float]]:
    """Read what the loss returned: sums with a graph, what each counts, and what it says itself."""
    if not isinstance(loss, Mapping):
        loss = {next(iter(counts)) if counts and len(counts) == 1 else "loss": loss}
    sums: dict[str, Tensor] = {}
    found: dict[str, float] = {}
    said: dict[str, float] = {}
    for term, value in loss.items():
        loss_sum = value.sum if isinstance(value, LossSum) else value
        if not isinstance(loss_sum, Tensor) or loss_sum.numel() != 1:
            raise TypeError(
                f"The loss `{term}` is `{type(value).__name__}`, and only a number can be summed "
                "and differentiated. Return the loss sum as a tensor of shape [], or a `LossSum`."
            )
        carried = checked_count(value.count, term) if isinstance(value, LossSum) else None
        counted = None if counts is None else counts.get(term)
        if counts is not None and counted is None:
            raise TypeError(
                f"The loss has a term `{term}` that `count` says nothing about (it counts "
                f"{', '.join(f'`{name}`' for name in counts)}). Count it, too."
            )
        if carried is None and counted is None:
            raise TypeError(
                f"The loss `{term}` comes without a count, so it is not known what its mean is "
                "over. Pass `count=`, or return a `LossSum`."
            )
        if carried is not None:
            said[term] = carried
        sums[term] = loss_sum
        found[term] = float(carried if counted is None else counted)  # type: ignore[arg-type]
    return sums, found, said


def _mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        pieces = {key: _mapped(value, change) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return type(batch)(pieces)  # type: ignore[call-arg]
        clone = copy.copy(batch)  # keeps what a tokenizer's output carries beside its tensors
        clone.update(pieces)
        return clone
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, change) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_mapped(value, change) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(
            batch,
            **{f.name: _mapped(getattr(batch, f.name), change) for f in dataclasses.fields(batch)},
        )
    return batch
