"""The update itself: how far the weights really moved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..gradients import Gradients
from .measures import norms_of, root, squared
from .observer import Observer, OpenWindow, Reading, Subject
from .parts import Parts, refuse_mixed_owners

__all__ = ["Updates"]

_HALF = (torch.float16, torch.bfloat16)


class Updates(Observer):
    r"""Add how far the weights really moved, moments, decay and rounding included.

        ||w_after - w_before||,   that over ||w_before||,   and eta * ||g clipped||

    The last is what plain SGD would move: how far from it the actual update is shows what the
    optimizer made of the gradient. About 1e-3 of its own length an update is usual for a matrix;
    far less learns nothing, far more forgets. Fields: `update_norm` x, `update_norms`,
    `weight_norms` (before the step) and `update_to_weight`, all {name: x}, and `naive_update_norm`
    x. A tensor that was all zeros has no ratio. Only of applied updates, and of parameters that had
    a gradient.

    Costs one copy of the weights, kept all the time, and about six reads of them in an update that
    is due. Where they are sharded, one small collective, shared with the other observers.

    Args:
        every: Look at updates `every`, `2 * every` and so on.

    Example:
        >>> import midstep as ms, torch
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 3.0)
        >>> updater = ms.Updater(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), observers=[Updates()])
        >>> record = updater.update([torch.tensor([[3.0, 4.0]])],
        ...     lambda model, x: model(x).sum(), count=ms.rows())
        >>> record.extra["update_norm"], record.extra["naive_update_norm"]
        (0.5, 0.5)
        >>> record.extra["update_to_weight"]
        {'weight': 0.1178...}
    """

    def __init__(self, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._subject: Subject | None = None
        self._copies: dict[Tensor, Tensor] = {}
        self._weights: Sequence[float] | Tensor = ()
        self._naive = 0.0
        self._reading: list[Reading] = []

    def attach(self, subject: Subject) -> None:
        """Refuse ranks that step parameters of their own.

        Raises:
            NotImplementedError: They do.
        """
        refuse_mixed_owners(subject, "Updates")

    def begin(self, subject: Subject, window: OpenWindow, started: float) -> None:
        """Note whose weights they are."""
        self._subject = subject

    @torch.no_grad()
    def before_step(self, gradients: Gradients) -> None:
        """Copy and measure the weights."""
        assert self._subject is not None
        parts = Parts(self._subject)
        weights = [parts.local(p.detach()) for p in gradients.parameters]
        for parameter, weight in zip(gradients.parameters, weights, strict=True):
            if parameter not in self._copies:
                self._copies[parameter] = torch.empty_like(weight)
        copies = [self._copies[p] for p in gradients.parameters]
        torch._foreach_copy_(copies, weights)
        self._weights = norms_of(copies)
        self._naive = _naive_norm(gradients, self._subject.optimizer)

    @torch.no_grad()
    def after_step(self, gradients: Gradients) -> None:
        """Take the weights from their copies, and measure what is left."""
        assert self._subject is not None
        parts = Parts(self._subject)
        weights = [parts.local(p.detach()) for p in gradients.parameters]
        copies = [self._copies[p] for p in gradients.parameters]
        narrow = [i for i, copy in enumerate(copies) if copy.dtype in _HALF]
        for index in narrow:  # a difference of two bf16 numbers need not be one
            copies[index] = copies[index].float() - weights[index].float()
        others = [i for i in range(len(copies)) if i not in set(narrow)]
        if others:
            torch._foreach_sub_([copies[i] for i in others], [weights[i] for i in others])
        names = [self._subject.names[position] for position in gradients.positions]
        naive = self._naive
        updates, weights_before = squared(norms_of(copies)), squared(self._weights)
        columns = [(updates, gradients.parameters), (weights_before, gradients.parameters)]
        self._reading = [parts.reading(columns, lambda whole: _fields(whole, names, naive))]

    def read(self) -> Iterable[Reading]:
        """Give it; nothing of an update that was skipped."""
        return self._reading

    def end(self) -> None:
        """Forget what was measured; the memory of the copies is used again."""
        self._subject, self._weights, self._reading = None, (), []


def _naive_norm(gradients: Gradients, optimizer: torch.optim.Optimizer) -> float:
    """The length of a plain step of SGD: of each group's rate times its clipped gradient."""
    rates = {p: float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    norms = zip(gradients.parameters, gradients.norms(2.0), strict=True)
    return math.hypot(*(rates[parameter] * norm for parameter, norm in norms))


def _fields(
    whole: Sequence[Sequence[float]], names: Sequence[str], naive: float
) -> Mapping[str, Any]:
    updates = dict(zip(names, map(root, whole[0]), strict=True))
    weights = dict(zip(names, map(root, whole[1]), strict=True))
    return {
        "update_norm": math.hypot(*updates.values()),
        "update_norms": updates,
        "weight_norms": weights,
        "update_to_weight": {n: updates[n] / weights[n] for n in names if weights[n]},
        "naive_update_norm": naive,
    }
