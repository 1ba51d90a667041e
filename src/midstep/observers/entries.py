"""Single entries of the gradient: the largest, and those that are zero."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..gradients import Gradients
from .measures import wide
from .observer import Numbers, Observer, OpenWindow, Reading, Subject
from .parts import Parts, refuse_mixed_owners

__all__ = ["Entries"]


class Entries(Observer):
    """Add the largest entry of the gradient, and the share of entries that are exactly zero.

    A tensor whose entries are nearly all zero is masked, dead, or underflows. Of the true gradient
    before clipping; of a sparse one the entries that are not stored are zeros. Fields:
    `grad_largest` x, the largest magnitude, `grad_largest_in` the name of its tensor, `grad_zeros`
    x, the share from 0 to 1 over all tensors, and `grad_zeros_by_tensor` {name: share}.

    Costs two reads of the gradients. Where they are sharded, one small collective, shared with the
    other observers.

    Args:
        every: Look at updates `every`, `2 * every` and so on.

    Example:
        >>> import midstep as ms, torch
        >>> model = torch.nn.Linear(4, 1)
        >>> updater = ms.Updater(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), observers=[Entries()])
        >>> record = updater.update([torch.tensor([[3.0, 0.0, -4.0, 0.0]])],
        ...     lambda model, x: model(x).sum(), count=ms.rows())
        >>> record.extra["grad_largest"], record.extra["grad_largest_in"]
        (4.0, 'weight')
        >>> record.extra["grad_zeros"], record.extra["grad_zeros_by_tensor"]
        (0.4, {'weight': 0.5, 'bias': 0.0})
    """

    def __init__(self, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._subject: Subject | None = None
        self._reading: list[Reading] = []

    def attach(self, subject: Subject) -> None:
        """Refuse ranks that step parameters of their own.

        Raises:
            NotImplementedError: They do.
        """
        refuse_mixed_owners(subject, "Entries")

    def begin(self, subject: Subject, window: OpenWindow, started: float) -> None:
        """Note whose gradients they are."""
        self._subject = subject

    def on_gradients(self, gradients: Gradients) -> None:
        """Read them: once for the largest, once for the zeros."""
        assert self._subject is not None
        if not gradients.tensors:
            return
        parts = Parts(self._subject)
        names = [self._subject.names[position] for position in gradients.positions]
        num_entries = [parameter.numel() for parameter in gradients.parameters]
        largest = _largest(gradients)
        found = _num_nonzero(gradients.tensors)
        self._reading = [
            _largest_reading(largest, names, parts),
            parts.reading(
                [(found, gradients.parameters)],
                lambda whole: _zeros(whole[0], names, num_entries),
            ),
        ]

    def read(self) -> Iterable[Reading]:
        """Give them."""
        return self._reading

    def end(self) -> None:
        """Forget them."""
        self._subject, self._reading = None, []


@torch.no_grad()
def _largest(gradients: Gradients) -> Sequence[float] | Tensor:
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in gradients.tensors]
    found = [
        torch.linalg.vector_norm(t, float("inf")) if t.numel() else t.new_zeros(()) for t in tensors
    ]
    factors = [abs(factor) for factor in gradients.factors]
    if all(t.is_cpu for t in tensors):
        return [x.item() * factor for x, factor in zip(found, factors, strict=True)]
    device = next(t.device for t in tensors if not t.is_cpu)
    stacked = torch.stack([x.to(device, wide(device)) for x in found])
    return stacked * torch.tensor(factors, dtype=stacked.dtype).to(device, non_blocking=True)


@torch.no_grad()
def _num_nonzero(tensors: Sequence[Tensor]) -> Sequence[float] | Tensor:
    if all(t.is_cpu for t in tensors):
        return [float(torch.count_nonzero(t)) for t in tensors]
    device = next(t.device for t in tensors if not t.is_cpu)
    counts = [torch.count_nonzero(t).to(device) for t in tensors]
    return torch.stack(counts).to(wide(device))


def _largest_reading(
    largest: Sequence[float] | Tensor, names: Sequence[str], parts: Parts
) -> Reading:
    """Each rank's largest entries side by side, since a sum keeps no largest."""
    if not parts.is_split:
        return Reading(largest, lambda whole: _top(whole, names))
    count, before = len(names), parts.rank
    if isinstance(largest, Tensor):
        slots = largest.new_zeros(count * parts.size)
        slots[before * count : (before + 1) * count] = largest
        numbers: Numbers = slots
    else:
        after = parts.size - before - 1
        numbers = [0.0] * (count * before) + list(largest) + [0.0] * (count * after)
    return Reading(numbers, lambda whole: _top(whole, names), is_part=True)


def _top(largest: Sequence[float], names: Sequence[str]) -> dict[str, Any]:
    # nan is larger than anything, as it is what must be found.
    index = max(range(len(largest)), key=lambda i: (largest[i] != largest[i], largest[i]))
    return {"grad_largest": largest[index], "grad_largest_in": names[index % len(names)]}


def _zeros(
    num_nonzero: Sequence[float], names: Sequence[str], num_entries: Sequence[int]
) -> dict[str, Any]:
    zeros = [n - round(k) for k, n in zip(num_nonzero, num_entries, strict=True)]
    shares = {name: zero / n for name, zero, n in zip(names, zeros, num_entries, strict=True) if n}
    return {
        "grad_zeros": sum(zeros) / max(1, sum(num_entries)),
        "grad_zeros_by_tensor": shares,
    }
