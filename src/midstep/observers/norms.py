"""Norms of the gradient by tensor and by parameter group."""

from __future__ import annotations

from collections.abc import Iterable

from ..gradients import Gradients, combined_norm
from .observer import Observer, OpenWindow, Reading, Subject

__all__ = ["GradNorms"]


class GradNorms(Observer):
    r"""Add the L2 norm of each gradient, and of each parameter group, before clipping.

        ||g_i||,   ||g of group k|| = (sum over i in group k of ||g_i||^2)^(1/2)

    Of the true gradient of the mean loss: unscaled, divided, added up over ranks; of a sharded
    parameter the norm of the whole. Fields: `grad_norms` {name: x} and `grad_norms_by_group` [x per
    parameter group]. A parameter without a gradient is left out.

    Costs nothing where the clip rule measures L2 norms, since the norm of all gradients is made of
    these; one more read of the gradients otherwise. On several ranks they travel with the norm of
    all; where the clip rule measures another norm, in a small collective of their own.

    Args:
        every: Look at updates `every`, `2 * every` and so on.

    Example:
        >>> import midstep as ms, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> updater = ms.Updater(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), observers=[GradNorms()])
        >>> record = updater.update(
        ...     [torch.tensor([[3.0, 4.0]])], lambda model, x: model(x).sum(), count=ms.rows())
        >>> record.extra["grad_norms"]
        {'weight': 5.0, 'bias': 1.0}
    """

    needs_each = True

    def __init__(self, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._subject: Subject | None = None
        self._norms: dict[str, float] = {}
        self._by_group: list[float] = []

    def begin(self, subject: Subject, window: OpenWindow, started: float) -> None:
        """Note whose gradients they are."""
        self._subject = subject

    def on_gradients(self, gradients: Gradients) -> None:
        """Measure them, or take what was measured."""
        assert self._subject is not None
        norms = gradients.norms(2.0)
        names = self._subject.names
        self._norms = {
            names[position]: norm for position, norm in zip(gradients.positions, norms, strict=True)
        }
        of = dict(zip(gradients.parameters, norms, strict=True))
        self._by_group = [
            combined_norm([of[p] for p in dict.fromkeys(group["params"]) if p in of], 2.0)
            for group in self._subject.optimizer.param_groups
        ]

    def read(self) -> Iterable[Reading]:
        """Give them."""
        if self._norms:
            fields = {"grad_norms": self._norms, "grad_norms_by_group": self._by_group}
            yield Reading((), lambda _: fields)

    def end(self) -> None:
        """Forget them."""
        self._subject, self._norms, self._by_group = None, {}, []
