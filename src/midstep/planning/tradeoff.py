"""What recompute costs and saves on this model, measured for every number of blocks k.

Beside each stands the model of the textbooks, of L equal blocks of which k are run again together:

    held at a time, in parts of a block = L/k + k,   least near k = sqrt(L)

It counts an input of a block like all that the block makes, so it is a sketch; the measurement is
what counts.

Reference: Chen et al. 2016, arXiv:1604.06174.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..recomputing import blocks_of, recompute
from ..snapshot import Buffers, RandomState
from .peaks import peak_of

__all__ = ["Runner", "Tradeoff", "measure_tradeoff", "parity"]


@dataclasses.dataclass(frozen=True, slots=True)
class Tradeoff:
    """One choice of k.

    Attributes:
        every: k, the blocks that are run again together; 0 for none.
        peak_bytes: Most bytes a forward and backward held, beyond those held before.
        relative_time: Time of forward and backward over that without recompute.
        gradient_gap: Largest difference of an entry of a gradient from those without recompute.
        model_parts: L/k + k; L without recompute.
    """

    every: int
    peak_bytes: int
    relative_time: float
    gradient_gap: float
    model_parts: float


def measure_tradeoff(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    *,
    every: Sequence[int] | None = None,
    blocks: Sequence[nn.Module] | None = None,
    repeats: int = 3,
) -> list[Tradeoff]:
    """Measure forward and backward without recompute and for each k.

    Weights stay; gradients are cleared; random state and buffers are put back. Times are medians
    of interleaved rounds, because a busy machine slows all of a round.

    Args:
        model: With repeated blocks.
        loss: Runs the model on a batch and gives the loss. Shape [].
        every: Which k; None for 1 .. L.
        blocks: Which are run again; None for those `repeated_blocks` finds.
        repeats: Rounds of timing.

    Returns:
        First the row without recompute, then one for each k.
    """
    found = list(blocks_of(model).values()) if blocks is None else list(blocks)
    choices = [0, *(every if every is not None else range(1, len(found) + 1))]
    before, buffers = RandomState.capture(), Buffers(model)
    run = Runner(model, loss, found, before, buffers)
    try:
        run.once(0)  # warm
        plain = run.gradients(0)
        peaks = {k: run.peak(k) for k in choices}
        gaps = {k: _gap(run.gradients(k), plain) for k in choices}
        rounds: dict[int, list[float]] = {k: [] for k in choices}
        for _ in range(repeats):
            for k in choices:
                rounds[k].append(run.seconds(k))
    finally:
        before.restore()
        buffers.restore()
        model.zero_grad()
    ratios = {
        k: statistics.median(a / b for a, b in zip(rounds[k], rounds[0], strict=True))
        for k in choices
    }
    L = len(found)
    return [
        Tradeoff(k, peaks[k], ratios[k], gaps[k], L / k + k if k else float(L)) for k in choices
    ]


def parity(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    *,
    every: int = 1,
    blocks: Sequence[nn.Module] | None = None,
) -> dict[str, float]:
    """Compare a model with and without recompute: loss, gradients, random draws and buffers.

    Weights, gradients, buffers and random state are as before afterwards, gradients cleared.

    Args:
        model: With repeated blocks.
        loss: Runs the model on a batch and gives the loss. Shape [].
        every: Blocks that are run again together.
        blocks: Which; None for those `repeated_blocks` finds.

    Returns:
        The largest difference of each: "loss", "gradients", "draws" and "buffers". Draws are what
        comes next from the random stream, so dropout that drew otherwise shows there and in the
        gradients.
    """
    found = list(blocks_of(model).values()) if blocks is None else list(blocks)
    before, buffers = RandomState.capture(), Buffers(model)
    run = Runner(model, loss, found, before, buffers)
    try:
        a, b = (run.all(k) for k in (0, every))
    finally:
        before.restore()
        buffers.restore()
        model.zero_grad()
    return {name: _gap(a[name], b[name]) for name in a}


class Runner:
    """Runs forward and backward from the same random state and buffers each time.

    Args:
        model: Changed while it runs only.
        loss: Runs it on a batch. Shape [].
        blocks: Which are run again.
        state: Of the random streams, put back before each run.
        buffers: Put back, too.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module], Tensor],
        blocks: list[nn.Module],
        state: RandomState,
        buffers: Buffers,
    ) -> None:
        self._model = model
        self._loss = loss
        self._blocks = blocks
        self._state = state
        self._buffers = buffers
        self._device = next(model.parameters()).device

    def once(self, every: int) -> Tensor:
        """Run once, with every k blocks run again together; 0 for none."""
        self._model.zero_grad()
        self._state.restore()
        self._buffers.restore()
        handle = recompute(self._model, every=every, blocks=self._blocks) if every else None
        try:
            value = self._loss(self._model)
            value.backward()  # type: ignore[no-untyped-call]
        finally:
            if handle is not None:
                handle.remove()
        return value.detach()

    def gradients(self, every: int) -> list[Tensor]:
        """Give the gradients of a run."""
        self.once(every)
        return [p.grad.clone() for p in self._model.parameters() if p.grad is not None]

    def all(self, every: int) -> dict[str, list[Tensor]]:
        """Give all that a run leaves."""
        value = self.once(every)
        return {
            "loss": [value],
            "draws": [torch.rand(8)],
            "gradients": [p.grad.clone() for p in self._model.parameters() if p.grad is not None],
            "buffers": [buffer.detach().clone() for buffer in self._model.buffers()],
        }

    def peak(self, every: int) -> int:
        """Give the most bytes that a run held, beyond those held before."""
        self._model.zero_grad()  # what is released within must have been allocated within
        return peak_of(lambda: self.once(every), self._device).num_bytes

    def seconds(self, every: int) -> float:
        """Time a run."""
        started = time.perf_counter()
        self.once(every)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - started


def _gap(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(
        ((a.double() - b.double()).abs().max().item() for a, b in pairs if a.numel()), default=0.0
    )
