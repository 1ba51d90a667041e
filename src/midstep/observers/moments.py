"""The moments that an optimizer keeps of the gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..gradients import Gradients
from .measures import norms_of, root, squared, wide
from .observer import Observer, OpenWindow, Reading, Subject
from .parts import Parts, refuse_mixed_owners

__all__ = ["Moments"]

# By the names that torch's own optimizers use.
_FIRST = ("exp_avg", "momentum_buffer")
_SECOND = ("exp_avg_sq", "square_avg", "sum")


class Moments(Observer):
    """Add what the optimizer remembers of earlier gradients: norm of the first, mean of the second.

    As the step left them, without bias correction. Known are Adam and its kin, SGD with momentum,
    RMSprop, Adadelta and Adagrad; other optimizers add nothing. Field: `moments`
    {name: {"first": norm, "second": mean}}, each where the optimizer keeps it. Only of applied
    updates.

    Costs a read of each moment. Where they are sharded, one small collective, shared with the other
    observers.

    Args:
        every: Look at updates `every`, `2 * every` and so on.

    Example:
        >>> import midstep as ms, torch
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> updater = ms.Updater(model, torch.optim.Adam(model.parameters()), observers=[Moments()])
        >>> record = updater.update([torch.tensor([[3.0, 4.0]])],
        ...     lambda model, x: model(x).sum(), count=ms.rows())
        >>> record.extra["moments"]  # a tenth of (3, 4), and a thousandth of (9, 16)
        {'weight': {'first': 0.5, 'second': 0.0125}}
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
        refuse_mixed_owners(subject, "Moments")

    def begin(self, subject: Subject, window: OpenWindow, started: float) -> None:
        """Note whose moments they are."""
        self._subject = subject

    @torch.no_grad()
    def after_step(self, gradients: Gradients) -> None:
        """Read the moments of the parameters that were stepped."""
        assert self._subject is not None
        parts = Parts(self._subject)
        names = dict(zip(self._subject.parameters, self._subject.names, strict=True))
        state = self._subject.optimizer.state
        firsts = _kept(state, gradients.parameters, _FIRST)
        seconds = _kept(state, gradients.parameters, _SECOND)
        if not firsts and not seconds:
            return
        squares = squared(norms_of([parts.local(t) for t in firsts.values()]))
        sums = _sums([parts.local(t) for t in seconds.values()])

        def fields(whole: list[Sequence[float]]) -> dict[str, Any]:
            moments: dict[str, dict[str, float]] = {}
            for parameter, square in zip(firsts, whole[0], strict=True):
                moments.setdefault(names[parameter], {})["first"] = root(square)
            for parameter, total in zip(seconds, whole[1], strict=True):
                mean = total / max(1, parameter.numel())
                moments.setdefault(names[parameter], {})["second"] = mean
            return {"moments": moments}

        columns = [(squares, list(firsts)), (sums, list(seconds))]
        self._reading = [parts.reading(columns, fields)]

    def read(self) -> Iterable[Reading]:
        """Give them; nothing of an update that was skipped."""
        return self._reading

    def end(self) -> None:
        """Forget them."""
        self._subject, self._reading = None, []


def _kept(
    state: Mapping[Any, Any], parameters: Sequence[Tensor], spellings: Sequence[str]
) -> dict[Tensor, Tensor]:
    """Find a moment of each parameter that has it, under the name its optimizer gives it."""
    found: dict[Tensor, Tensor] = {}
    for parameter in parameters:
        own = state.get(parameter, {})
        kept = next((own[name] for name in spellings if name in own), None)
        if isinstance(kept, Tensor):
            found[parameter] = kept
    return found


def _sums(tensors: Sequence[Tensor]) -> Sequence[float] | Tensor:
    sums = [t.sum(dtype=wide(t.device)) for t in tensors]
    if all(t.is_cpu for t in tensors):
        return [x.item() for x in sums]
    device = next(t.device for t in tensors if not t.is_cpu)
    return torch.stack([x.to(device) for x in sums])
