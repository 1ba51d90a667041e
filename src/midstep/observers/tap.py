"""The tap: what each microbatch adds to the gradient, measured before it is added."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..gradients import tensor_norms, values_of
from ..tally import Tally

__all__ = ["Flow", "OpenWindow", "Tap", "wide"]


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
    first is kept until all is there: one copy of that gradient.

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
        self._norms: dict[Tensor, float | Tensor | None] = {}
        self._several: set[Tensor] = set()  # reached more than once a backward
        self._kept: dict[Tensor, Tensor] = {}
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
        for parameter, whole in self._kept.items():
            self._norms[parameter] = _norm(whole)
        norm = _joint(list(self._norms.values()))
        unit = float(self._window.unit) * denominator / count / self._rank_factor if count else 0.0
        while len(self.flows) < index:  # microbatches that were left out
            self.flows.append(Flow(0, None, 0.0))
        self.flows.append(Flow(count, norm, unit))
        self._is_first = self._is_first and not self._norms
        self._norms, self._kept = {}, {}

    def shut(self) -> None:
        """Take the hooks away; what was measured stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        """Take the hooks away and forget what was measured."""
        self.shut()
        self.flows, self._norms, self._kept = [], {}, {}
        self._window, self._before, self._is_first = None, 0.0, True

    def _hook(self, parameter: Tensor) -> Callable[[Tensor], None]:
        def arrive(grad: Tensor) -> None:
            self._arrive(parameter, grad)

        return arrive

    @torch.no_grad()
    def _arrive(self, parameter: Tensor, grad: Tensor) -> None:
        if parameter in self._kept:
            self._kept[parameter] = self._kept[parameter] + grad
        elif parameter in self._several:
            self._kept[parameter] = grad.clone()
        elif parameter not in self._norms:
            self._norms[parameter] = _norm(grad)
        else:
            self._several.add(parameter)
            if self._is_first and parameter.grad is not None:
                # What came first lies in `.grad` by now, and nothing else does.
                self._kept[parameter] = parameter.grad + grad
            else:
                self._norms[parameter] = None  # not to be known any more; next time it is


def wide(device: torch.device) -> torch.dtype:
    """The widest dtype of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def _norm(grad: Tensor) -> float | Tensor:
    values = values_of(grad)
    if values.is_cpu:
        return tensor_norms([values])[0]
    real = torch.view_as_real(values) if values.is_complex() else values
    return torch._foreach_norm([real], 2.0, dtype=wide(values.device))[0]


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
