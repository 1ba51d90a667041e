"""Timing: how long a microbatch takes for real, at two sizes, and so at any.

    seconds(rows) = a + b * rows

The intercept is what a small microbatch costs more than its share: launches, and weights that are
read once a microbatch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..batches import num_rows
from ..precision import FP32, Precision
from ..recomputing import recompute
from ..snapshot import Buffers, RandomState
from .trace import Loss, run_microbatch
from .twin import with_rows

__all__ = ["Timer"]

_REPEATS = 3


class Timer:
    """Times each precision and recompute once.

    Weights stay, gradients are cleared, random state and buffers are put back.

    Args:
        model: In real tensors.
        batch: One batch; no larger microbatch than this is run.
        loss: Of the update.
        sizes: Rows of the microbatches to choose from.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: Loss, sizes: Sequence[int]) -> None:
        self._model = model
        self._batch = batch
        self._loss = loss
        self._largest = max(sizes)
        here = num_rows(batch)
        self._points = sorted({min(*sizes, here), min(self._largest, here)})
        self._lines: dict[tuple[str, int], tuple[float, float]] = {}

    def relative(self, precision: Precision, every: int, rows: int, pieces: int) -> float:
        """Give the time of an update over that of one piece without recompute in float32."""
        a, b = self._line(precision, every)
        base, slope = self._line(FP32(), 0)
        return pieces * (a + b * rows) / (base + slope * self._largest)

    def _line(self, precision: Precision, every: int) -> tuple[float, float]:
        key = (type(precision).__name__, every)
        if key not in self._lines:
            with self._as_before():
                seconds = [self._seconds(precision, every, rows) for rows in self._points]
            if len(seconds) == 1:
                self._lines[key] = (0.0, seconds[0] / self._points[0])
            else:
                slope = (seconds[1] - seconds[0]) / (self._points[1] - self._points[0])
                slope = max(slope, 0.0)  # a busy machine may say that more rows take less time
                self._lines[key] = (max(0.0, seconds[0] - slope * self._points[0]), slope)
        return self._lines[key]

    def _seconds(self, precision: Precision, every: int, rows: int) -> float:
        microbatch = with_rows(self._batch, rows)
        device = next(self._model.parameters()).device
        handle = recompute(self._model, every=every) if every else None
        found = []
        try:
            for _ in range(1 + _REPEATS):
                started = time.perf_counter()
                run_microbatch(self._model, microbatch, self._loss, precision)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                found.append(time.perf_counter() - started)
        finally:
            if handle is not None:
                handle.remove()
        return statistics.median(found[1:])  # the first makes what is made once

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        state, buffers = RandomState.capture(), Buffers(self._model)
        try:
            yield
        finally:
            state.restore()
            buffers.restore()
            self._model.zero_grad()
