"""The tap: what each microbatch adds to the gradient, measured before it is added."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..gradients import values_of
from ..tally import Tally
from .measures import norms_of

__all__ = ["Flow", "OpenWindow", "Tap"]

_MOST_BYTES = 2**26  # of gradients that wait to be measured together


class OpenWindow(Protocol):
    """What an observer may know of the window of an update."""

    @property
    def index(self) -> int:
        """Position of the current microbatch, from 0; -1 before the first."""
        ...

    @property
    def unit(self) -> float | Tensor:
        """What `.grad` must be multiplied by to be the gradient of the mean loss, unscaled."""
        ...

    @property
    def tally(self) -> Tally:
        """Counts and loss sums."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Flow:
    """What one microbatch adds.

    Attributes:
        count: What it counts, of the first loss term.
        norm: Of what flowed into the accumulators; None where it cannot be known.
        unit: What that must be multiplied by to be the gradient of its own mean loss.
    """

    count: float
    norm: float | Tensor | None
    unit: float

    @property
    def own_norm(self) -> float | Tensor | None:
        """The norm of the gradient of its own mean loss; None where it has none."""
        return None if self.norm is None or not self.count else self.norm * self.unit


class Tap:
    """Measures what flows into each accumulator, by a hook on every parameter.

    A parameter that is used several times in a forward, tied ones included, is reached once a
    backward, by the sum. Where it is reached several times (reentrant checkpointing), what came
    first is kept until all is there.

    What arrives is measured many tensors at a time, which takes a quarter of the time of one by one
    (decision 15). Until then it is kept: at most 64 MiB, in the memory that autograd made for it.

    Hooks are there only while it is open. All who want to know share one: opening twice is opening
    once.

    Attributes:
        flows: Of each microbatch so far.
    """

    def __init__(self) -> None:
        self.flows: list[Flow] = []
        self._window: OpenWindow | None = None
        self._rank_factor = 1.0
        self._handles: list[RemovableHandle] = []
        self._reached: set[Tensor] = set()  # in this backward
        self._several: set[Tensor] = set()  # those that are reached more than once
        self._waiting: dict[Tensor, Tensor] = {}
        self._waiting_bytes = 0
        self._partial: dict[Tensor, Tensor] = {}
        self._norms: dict[Tensor, float | Tensor | None] = {}
        self._before = 0.0
        self._is_first = True

    def open(self, window: OpenWindow, parameters: Sequence[Tensor], rank_factor: float) -> None:
        """Hook every parameter that is trained.

        Args:
            window: Whose microbatches.
            parameters: What the optimizer steps.
            rank_factor: What each seed is multiplied by, so that ranks add up.
        """
        if self._window is window:
            return
        self.close()
        self._window, self._rank_factor = window, rank_factor
        self._handles = [
            parameter.register_hook(self._hook(parameter))  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]

    def take(self, index: int) -> None:
        """Note a microbatch whose backward is done."""
        assert self._window is not None
        if len(self.flows) > index:
            return  # somebody else noted it
        tally = self._window.tally
        term = next(iter(tally.denominators), "loss")
        denominator = tally.denominators.get(term, 0)
        if tally.counts is None:
            count, self._before = denominator - self._before, denominator
        else:
            count = tally.counts[index].get(term, 0)
        self._waiting.update(self._partial)
        self._measure()
        norm = _joint(list(self._norms.values()))
        unit = float(self._window.unit) * denominator / count / self._rank_factor if count else 0.0
        while len(self.flows) < index:  # microbatches that were left out
            self.flows.append(Flow(0, None, 0.0))
        self.flows.append(Flow(count, norm, unit))
        self._is_first = self._is_first and not self._reached
        self._forget()

    def shut(self) -> None:
        """Take the hooks away; what was measured stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        """Take the hooks away and forget what was measured."""
        self.shut()
        self._forget()
        self.flows = []
        self._window, self._before, self._is_first = None, 0.0, True

    def _hook(self, parameter: Tensor) -> Callable[[Tensor], None]:
        def arrive(grad: Tensor) -> None:
            self._arrive(parameter, grad)

        return arrive

    @torch.no_grad()
    def _arrive(self, parameter: Tensor, grad: Tensor) -> None:
        if parameter in self._partial:
            self._partial[parameter] = self._partial[parameter] + grad
        elif parameter in self._several:
            self._partial[parameter] = grad
        elif parameter in self._reached:
            self._arrive_again(parameter, grad)
        else:
            self._waiting[parameter] = grad
            self._waiting_bytes += grad.element_size() * grad.numel()
            if self._waiting_bytes > _MOST_BYTES:
                self._measure()
        self._reached.add(parameter)

    def _arrive_again(self, parameter: Tensor, grad: Tensor) -> None:
        self._several.add(parameter)
        before = self._waiting.pop(parameter, None)
        if before is None and self._is_first:
            before = parameter.grad  # by now what came first lies there, and nothing else does
        if before is None:
            self._norms[parameter] = None  # not to be known any more; next time it is
        else:
            self._partial[parameter] = before + grad

    @torch.no_grad()
    def _measure(self) -> None:
        norms = norms_of([values_of(grad) for grad in self._waiting.values()])
        each = norms.unbind() if isinstance(norms, Tensor) else norms
        self._norms.update(zip(self._waiting, each, strict=True))
        self._waiting, self._waiting_bytes = {}, 0

    def _forget(self) -> None:
        self._reached, self._norms, self._partial = set(), {}, {}
        self._waiting, self._waiting_bytes = {}, 0


def _joint(norms: Sequence[float | Tensor | None]) -> float | Tensor | None:
    if not norms or any(norm is None for norm in norms):
        return None
    on_device = [norm for norm in norms if isinstance(norm, Tensor)]
    on_host = [norm for norm in norms if isinstance(norm, float)]
    if not on_device:
        return math.hypot(*on_host)
    device = on_device[0].device
    total = torch.stack([norm.to(device) for norm in on_device]).square().sum()
    return (total + sum(norm * norm for norm in on_host)).sqrt()
