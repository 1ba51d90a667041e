"""The sweep: rising rates, one update each, with nothing left changed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from ..cutting import Count, cutting_of
from ..nonfinite import Skip
from ..passes import LossFunction
from ..records import UpdateRecord, Verdict
from ..trial import trial
from ..updater import Updater
from .bounds import MIN_POINTS
from .reading import Curve, Reading, read_curves
from .smoothing import median_spread

__all__ = ["RangeTest", "lr_range"]

Batch = TypeVar("Batch")

_MAX_SKIPPED = 30  # in a row; a loss scale of 2**16 needs at most 16 to find its place
_NUM_RECENT = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RangeTest:
    """A range test: its curves, and what they say.

    Attributes:
        reading: The bounds, or why there are none.
        curves: Losses over rates, one curve a repeat.
        num_skipped: Updates that were skipped; they are no points and did not move the rate.
        is_warm: Whether the optimizer had state: the test then speaks of these weights, not of a
            run from the start.
    """

    reading: Reading
    curves: tuple[Curve, ...]
    num_skipped: int
    is_warm: bool

    def __str__(self) -> str:
        lines = [str(self.reading)]
        if self.is_warm:
            lines.append("from weights that were trained already: it speaks of these")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Give everything as one line of JSON; a loss that is not finite is a string."""
        curves = [
            {
                "lr": list(curve.lr),
                "loss_mean": [x if math.isfinite(x) else str(x) for x in curve.loss_mean],
            }
            for curve in self.curves
        ]
        about = {"num_skipped": self.num_skipped, "is_warm": self.is_warm}
        return json.dumps({**self.reading.as_dict(), **about, "curves": curves}, allow_nan=False)


def lr_range(
    updater: Updater,
    batches: Iterable[Batch],
    loss: LossFunction[Batch],
    *,
    size: int | None = None,
    rows: int | None = None,
    targets: int | None = None,
    count: Count | None = None,
    start_lr: float = 1e-6,
    end_lr: float = 10.0,
    num_updates: int = 80,
    linear: bool = False,
    repeats: int = 1,
    on_point: Callable[[int, float, float], None] | None = None,
) -> RangeTest:
    """Find between which learning rates to search, from updates that leave no trace.

        lr(i) = start_lr (end_lr / start_lr)^(i / (num_updates - 1))

    One point per applied update, made exactly as in training: windows, clipping, precision, decay.
    The rate is that of the first parameter group; the others keep their ratio to it. Skipped
    updates are no points and do not move the rate. A sweep ends early when the loss has blown up,
    by a rule that takes negative and bounded losses, or is no longer finite. On several ranks the
    losses are global, so that all stop together.

    What it finds is a search interval and no optimum: a range test reads stability in one short
    run. Weights, optimizer, scale, clip statistics, clocks, random streams, place in the data and
    gradients are put back to the last bit, also after an error or Ctrl-C. More updates give lower
    bounds: more of the fall is done before.

    Costs at most `repeats * num_updates` updates, and a copy of weights and optimizer state.

    Args:
        updater: As it would train. Its own schedule rests.
        batches: Something that can be iterated again, such as a `DataLoader`.
        loss: As in `Updater.update`.
        size: Batches an update; exactly one of `size`, `rows` and `targets`.
        rows: Each batch is an update, cut into microbatches of at most so many rows.
        targets: Targets an update.
        count: As in `Updater.windows`.
        start_lr: First rate.
        end_lr: Last rate.
        num_updates: Points of a sweep; at least 12. 80 suit trainings of some 400 updates.
        linear: Rise by equal steps instead of equal factors; few points are then small.
        repeats: Sweeps from the same weights, each with later data and other random draws.
        on_point: Called after each point with its index over all sweeps, rate and loss.

    Raises:
        ValueError: A number is out of range, `batches` can be read only once, or there are none.
        WindowError: A window is open.

    Example:
        >>> import midstep as ms
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(4, 1)
        >>> data = [(x := torch.randn(64, 4), x.sum(1, keepdim=True)) for _ in range(20)]
        >>> updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> found = lr_range(
        ...     updater, data, lambda model, batch: (model(batch[0]) - batch[1]).square().sum(),
        ...     size=1, count=lambda batch: len(batch[0]), start_lr=1e-4, num_updates=60)
        >>> print(found.reading.outcome, found.reading.ceiling_kind)
        descent rise

    Reference:
        Smith 2017, Cyclical Learning Rates for Training Neural Networks, arXiv:1506.01186.
    """
    cutting_of(size=size, rows=rows, targets=targets, drop_tail=False, count=count)
    _check(start_lr, end_lr, num_updates, repeats, batches)
    spaced = np.linspace if linear else np.geomspace
    rates = [float(lr) for lr in spaced(start_lr, end_lr, num_updates)]
    base = _base_rate(updater.optimizer)
    is_warm = bool(updater.optimizer.state)

    def cut(data: Iterable[Batch]) -> Generator[Any]:
        yield from updater.windows(data, size=size, rows=rows, targets=targets, count=count)

    curves, num_skipped = [], 0
    for repeat in range(repeats):
        rise = _Rise(rates, base, updater.clock.step)
        with trial(updater, batches, nonfinite=Skip(), schedule=rise):
            if repeat:  # other dropout, too; drawn, so that ranks that differ go on to differ
                torch.manual_seed(int(torch.randint(2**62, ())) + repeat)
            windows = _endless(batches, repeat * num_updates * (size or 1), cut)
            sweep = _Sweep(rates, lambda window: updater.update(window, loss))
            with contextlib.closing(windows):
                for lr, loss_mean in sweep.points(windows):
                    if on_point is not None:
                        on_point(repeat * num_updates + len(sweep.losses) - 1, lr, loss_mean)
        curves.append(Curve(rates[: len(sweep.losses)], sweep.losses))
        num_skipped += sweep.num_skipped
    return RangeTest(
        reading=read_curves(curves), curves=tuple(curves), num_skipped=num_skipped, is_warm=is_warm
    )


class _Rise:
    """The factor on each group's base rate, a function of the applied updates."""

    def __init__(self, rates: Sequence[float], base: float, first_step: int) -> None:
        self._factors = [lr / base for lr in rates]
        self._first_step = first_step

    def __call__(self, step: int) -> float:
        return self._factors[min(step - self._first_step, len(self._factors) - 1)]


class _Sweep:
    """One rise, until its end or until the loss is lost."""

    def __init__(self, rates: Sequence[float], update: Callable[[Any], UpdateRecord]) -> None:
        self._rates = rates
        self._update = update
        self.losses: list[float] = []
        self.num_skipped = 0
        self._medians: list[float] = []

    def points(self, windows: Iterable[Any]) -> Iterator[tuple[float, float]]:
        """Run the updates; give rate and loss of each that counts."""
        skipped_in_a_row = 0
        for window in windows:
            record = self._update(window)
            loss = math.nan if record.loss_mean is None else record.loss_mean
            if record.applied or _is_broken(record):
                skipped_in_a_row = 0
                # A finite loss whose gradient is not is where the run broke, too.
                self.losses.append(loss if record.applied else math.nan)
                yield self._rates[len(self.losses) - 1], self.losses[-1]
                if len(self.losses) == len(self._rates) or self._is_lost():
                    return
                continue
            skipped_in_a_row += 1
            self.num_skipped += 1
            if skipped_in_a_row == _MAX_SKIPPED:
                return

    def _is_lost(self) -> bool:
        """Whether the last losses lie above the best ones by thrice the fall, noise allowed for."""
        if not math.isfinite(self.losses[-1]):
            return True
        self._medians.append(statistics.median(self.losses[-_NUM_RECENT:]))
        if len(self.losses) < MIN_POINTS:
            return False
        best = min(self._medians[_NUM_RECENT - 1 :])
        start = self._medians[_NUM_RECENT - 1]
        noise = median_spread(np.asarray(self.losses[: max(MIN_POINTS, len(self.losses) // 2)]))
        return self._medians[-1] - best > 3 * max(start - best, 5 * noise)


def _is_broken(record: UpdateRecord) -> bool:
    """Whether the run is lost, and not just the loss scale looking for its place."""
    if record.verdict is not Verdict.SKIPPED_NONFINITE:
        return False
    is_finite = record.loss_mean is not None and math.isfinite(record.loss_mean)
    return record.loss_scale <= 1.0 or not is_finite


def _endless(
    batches: Iterable[Batch], skip: int, cut: Callable[[Iterable[Batch]], Generator[Any]]
) -> Generator[Any]:
    """Give windows of one pass after the other; of the first, `skip` batches are passed over."""
    num_empty = 0
    data: Iterable[Batch] = itertools.islice(batches, skip, None) if skip else batches
    while num_empty < 2:
        num_empty += 1
        with contextlib.closing(cut(data)) as windows:
            for window in windows:
                num_empty = 0
                yield window
        data = batches
    raise ValueError("`lr_range`: the data gave no windows, so there is nothing to try a rate on.")


def _check(
    start_lr: float, end_lr: float, num_updates: int, repeats: int, batches: Iterable[Any]
) -> None:
    if not 0 < start_lr < end_lr < math.inf:
        raise ValueError(
            f"`lr_range(start_lr={start_lr}, end_lr={end_lr})`: the rate must rise from a positive "
            "start to a larger, finite end."
        )
    if num_updates < MIN_POINTS or repeats < 1:
        raise ValueError(
            f"`lr_range(num_updates={num_updates}, repeats={repeats})`: a curve of fewer than "
            f"{MIN_POINTS} points says nothing, and there must be at least 1 repeat."
        )
    if isinstance(batches, Iterator):  # to ask `iter` would draw from a loader's generator
        raise ValueError(  # noqa: TRY004 - an iterator is the right type, and used up
            "`lr_range`: `batches` can be read only once, so that the data could not be put back. "
            "Give something that can be iterated again, such as a `DataLoader` or a list."
        )


def _base_rate(optimizer: torch.optim.Optimizer) -> float:
    group = optimizer.param_groups[0]
    base = float(group.get("initial_lr", group["lr"]))
    if base > 0:
        return base
    raise ValueError(
        "`lr_range`: the first parameter group has learning rate 0, so that the others have no "
        "ratio to it. Give it the rate it trains with."
    )
