"""The microbatches of a window one by one, and the one that stands out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..gradients import Gradients
from .observer import Observer, OpenWindow, Reading, Subject
from .tap import Flow

__all__ = ["Microbatches", "outlier_of", "refuse_sharded"]

_TIMES = 5.0  # 3 names one in every 27 windows of a clean run (decision 15)


class Microbatches(Observer):
    """Add the norm of each microbatch's own gradient, and which one stands out.

    The gradient of a microbatch's own mean loss, as if it were a window alone; with several loss
    terms, that of its part in the window, over its share of the first term's targets. Before
    clipping, unscaled. Fields: `microbatch_grad_norms` [x in order; None where nothing was counted]
    and, only when one stands out, `outlier_microbatch`, its number in the window from 1.

    One stands out when its norm is more than 5 times the median of the others', of at least 2.
    A small microbatch has a longer gradient by noise alone, so the others' norms are first raised
    to what theirs could be with as few targets: by sqrt(their targets / its targets), if that is
    more than 1. One that is not finite stands out in any case.

    Costs a hook on each parameter in updates that are due, and there one more read of the gradients
    in each microbatch. On several ranks each records its own microbatches.

    Args:
        every: Look at updates `every`, `2 * every` and so on.

    Raises:
        NotImplementedError: (when the updater is made) Parameters are in parts on several ranks,
            where the gradient of one microbatch is never whole on any of them.

    Example:
        >>> import midstep as ms
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> updater = ms.Updater(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), observers=[Microbatches()])
        >>> batches = [torch.tensor([[x]]) for x in (1.0, 2.0, 30.0, 1.0)]
        >>> record = updater.update(batches, lambda model, x: model(x).sum(), count=ms.rows())
        >>> record.extra["microbatch_grad_norms"], record.extra["outlier_microbatch"]
        ([1.0, 2.0, 30.0, 1.0], 3)
    """

    watches_microbatches = True

    def __init__(self, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._subject: Subject | None = None

    def attach(self, subject: Subject) -> None:
        """Refuse parameters that lie in parts.

        Raises:
            NotImplementedError: They do.
        """
        refuse_sharded(subject, "Microbatches")

    def begin(self, subject: Subject, window: OpenWindow, started: float) -> None:
        """Open the tap."""
        self._subject = subject
        subject.open_tap(window)

    def after_backward(self, index: int) -> None:
        """Note what flowed in."""
        assert self._subject is not None
        self._subject.tap.take(index)

    def on_gradients(self, gradients: Gradients) -> None:
        """Take the hooks away: whatever runs the window again is nobody's microbatch."""
        assert self._subject is not None
        self._subject.tap.shut()

    def read(self) -> Iterable[Reading]:
        """Give the norms."""
        assert self._subject is not None
        flows = list(self._subject.tap.flows)
        if not flows:
            return
        own = [flow.own_norm for flow in flows]
        on_device = [norm for norm in own if isinstance(norm, Tensor)]
        if not on_device:
            yield Reading((), lambda _: _fields(own, flows))
            return

        def fields(numbers: Sequence[float]) -> dict[str, Any]:
            read = iter(numbers)
            return _fields([next(read) if isinstance(n, Tensor) else n for n in own], flows)

        yield Reading(torch.stack(on_device), fields)

    def end(self) -> None:
        """Close the tap."""
        if self._subject is not None:
            self._subject.tap.close()
        self._subject = None


def refuse_sharded(subject: Subject, name: str) -> None:
    """Refuse parameters that lie in parts on several ranks.

    Raises:
        NotImplementedError: They do.
    """
    if subject.ranks is None:
        return
    sharing = subject.ranks.sharing
    if any(sharing.lies_in_parts(p) for p in subject.parameters) or sharing.has_own:
        raise NotImplementedError(
            f"`{name}()` with parameters that lie in parts on several ranks (FSDP2, tensor "
            "parallel) or are one rank's own: the gradient of one microbatch is never whole on any "
            "of them. Leave this observer out, or use DDP."
        )


def outlier_of(norms: Sequence[float | None], counts: Sequence[float]) -> int | None:
    """Find the microbatch that stands out, by position from 0; None when none does."""
    known = [(norm, n, i) for i, (norm, n) in enumerate(zip(norms, counts, strict=True)) if n]
    found = [(norm, n, i) for norm, n, i in known if norm is not None]
    bad = [i for norm, _, i in found if not math.isfinite(norm)]
    if bad or len(found) < 3:
        return min(bad, default=None)
    largest, count, index = max(found)
    others = [x * max(1.0, math.sqrt(n / count)) for x, n, i in found if i != index]
    return index if largest > _TIMES * statistics.median(others) else None


def _fields(own: Sequence[float | Tensor | None], flows: Sequence[Flow]) -> dict[str, Any]:
    norms = [norm if norm is None else float(norm) for norm in own]
    outlier = outlier_of(norms, [flow.count for flow in flows])
    fields: dict[str, Any] = {"microbatch_grad_norms": norms}
    return fields if outlier is None else {**fields, "outlier_microbatch": outlier + 1}
