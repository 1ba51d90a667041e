"""The course of a run: its schedule, the size of its updates, its speed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..run import Floats, Run
from .finding import Finding
from .measures import fifths, percent, short, stepped, times

__all__ = ["noise_scale", "schedule", "swinging_targets", "throughput"]

_NUM_UPDATES = 20
_TAIL_SHARE = 0.1  # of a run, spent at the last rate of a schedule that has ended
_NUM_RATES = 10  # a curve takes more values than a staircase
_STILL_HIGH = 0.25  # of the peak; the curves in use end at a tenth or less
# Four-fold between the 5th and the 95th percentile: one target of a small update weighs as much as
# four of a large one. Padded text varies by less than two.
_SWING = 4.0
# The estimate is good to a factor of a few, and nothing changes fast around it: within 30 times of
# either side, neither a larger nor a smaller batch is plainly the better buy.
_NOISE_RATIO = 30.0
_SLOW = 0.5  # half the speed


def schedule(run: Run) -> Iterator[Finding]:
    """The schedule ended before the run did, or the run before its schedule.

    Args:
        run: The run.
    """
    updates, rates = stepped(run, "lr")
    if len(rates) < _NUM_UPDATES:
        return
    peak, last = float(rates.max()), float(rates[-1])
    tail = _constant_tail(rates)
    is_curve = len(np.unique(rates[int(np.argmax(rates)) :])) >= _NUM_RATES
    is_long = tail >= max(_NUM_RATES, _TAIL_SHARE * len(rates))
    if is_curve and last <= 0.5 * peak and is_long:
        begin = int(updates[-tail])
        yield Finding(
            rule="schedule-past-its-end",
            title="the run went on after its schedule had ended",
            seen=f"the rate falls from {short(peak)} to {short(last)} and stays there for the last "
            f"{tail:,} of {len(rates):,} applied updates, from update {begin:,} on.",
            look="the total that the schedule was made for, against the number of updates; a "
            "schedule that ticks more often than updates are applied ends early.",
            figures={"peak": peak, "last": last, "updates": tail},
            updates=(begin, int(updates[-1])),
        )
    elif not run.is_running and (words := _stopped_early(run, rates)):
        yield Finding(
            rule="stopped-early",
            title="the run stopped before its schedule had ended",
            seen=words,
            look="whether it was meant to; the low rates at the end of a schedule are where the "
            "loss falls most.",
            figures={"peak": peak, "last": last, "updates": len(rates)},
            updates=(int(updates[0]), int(updates[-1])),
        )


def swinging_targets(run: Run) -> Iterator[Finding]:
    """Updates are means over very different numbers of targets.

    Args:
        run: The run.
    """
    updates, targets = stepped(run, "targets")
    if len(targets) < _NUM_UPDATES:
        return
    low, middle, high = (float(q) for q in np.quantile(targets, (0.05, 0.5, 0.95)))
    if low <= 0 or high < _SWING * low:
        return
    yield Finding(
        rule="targets-swing",
        title="targets per update swing",
        seen=f"9 of 10 updates have between {short(low)} and {short(high)} targets, "
        f"{times(high / low)} as many; the median is {short(middle)}. All take the same rate, so a "
        "target in a small update moves the weights as much as several in a large one.",
        look="`windows(targets=...)`, which gathers batches until there are enough targets.",
        figures={"low": low, "median": middle, "high": high},
        updates=(int(updates[0]), int(updates[-1])),
    )


def noise_scale(run: Run) -> Iterator[Finding]:
    """The batch is far from the size at which gradient noise and gradient are alike.

    Args:
        run: The run.
    """
    updates, _ = stepped(run, "noise_scale")
    kept = np.isin(run.updates, updates[len(updates) // 2 :])
    scale = run.column("noise_scale")[kept]
    low, high = run.column("noise_scale_low")[kept], run.column("noise_scale_high")[kept]
    batch = run.column("targets")[kept]
    scale, batch = scale[np.isfinite(scale)], batch[np.isfinite(batch)]
    if len(scale) < _NUM_UPDATES // 2 or len(batch) == 0:
        return
    middle, size = float(np.median(scale)), float(np.median(batch))
    bottom = float(np.nanmedian(low)) if np.isfinite(low).any() else middle
    top = float(np.nanmedian(high)) if np.isfinite(high).any() else middle
    if middle <= 0 or bottom / _NOISE_RATIO <= size <= top * _NOISE_RATIO:
        return
    small = size < bottom
    yield Finding(
        rule="batch-below-noise-scale" if small else "batch-above-noise-scale",
        title=f"the batch is far {'below' if small else 'above'} the noise scale",
        seen=f"an update has {short(size)} targets; in the second half of the run the noise scale "
        f"is {short(middle)} (between {short(bottom)} and {short(top)}).",
        look="a larger batch, which would save nearly as many updates as it is larger; the rate "
        "has to follow it."
        if small
        else "a smaller batch: with this one most of the work repeats what the rest of the batch "
        "says already.",
        figures={"batch": size, "noise_scale": middle, "low": bottom, "high": top},
        updates=(int(run.updates[kept][0]), int(run.updates[kept][-1])),
    )


def throughput(run: Run) -> Iterator[Finding]:
    """The run became slow.

    Args:
        run: The run.
    """
    updates, seconds = stepped(run, "seconds")
    rate = run.targets_per_second[run.applied & np.isfinite(run.column("seconds"))]
    unit = "targets a second"
    if not np.isfinite(rate).all():
        with np.errstate(divide="ignore"):
            rate = 1.0 / seconds
        unit = "updates a second"
    kept = np.isfinite(rate)
    rate, updates = rate[kept], updates[kept]
    if len(rate) < 5 * _NUM_UPDATES // 2:
        return
    medians = fifths(rate)
    best, last = float(medians[:-1].max()), float(medians[-1])
    parts = np.array_split(rate, 5)
    usual = parts[int(np.argmax(medians[:-1]))]
    # A machine that others share slows down for a moment: the two must not overlap, either.
    if last >= _SLOW * best or np.quantile(parts[-1], 0.75) >= np.quantile(usual, 0.25):
        return
    yield Finding(
        rule="throughput-sags",
        title="the run became slow",
        seen=f"the median of the last fifth is {short(last)} {unit}, of the best fifth before "
        f"{short(best)}: {percent(last / best)} of it. By fifths: "
        f"{', '.join(short(float(m)) for m in medians)}.",
        look="time by stage, which says whether data, forward or step grew; memory that fills up; "
        "other work on the machine.",
        figures={"best": best, "last": last, "ratio": last / best},
        updates=(int(updates[len(updates) - len(parts[-1])]), int(updates[-1])),
    )


def _constant_tail(rates: Floats) -> int:
    other = np.flatnonzero(rates != rates[-1])
    return len(rates) - (int(other[-1]) + 1 if len(other) else 0)


def _stopped_early(run: Run, rates: Floats) -> str | None:
    planned = run.about.get("settings", {}).get("steps")
    num_applied = int(run.applied.sum())
    if isinstance(planned, int):
        if num_applied >= planned:
            return None
        return (
            f"{num_applied:,} of {planned:,} planned updates were applied. The last rate is "
            f"{short(float(rates[-1]))}, the peak {short(float(rates.max()))}."
        )
    # Without a plan only a line or the upper half of a cosine can be told from a rate that falls
    # for ever, as exponential and inverse-sqrt do: those fall more and more slowly.
    peak, last = float(rates.max()), float(rates[-1])
    tenth = len(rates) // 10
    if tenth < 2 or last <= _STILL_HIGH * peak:
        return None
    before, late = rates[-2 * tenth - 1] - rates[-tenth - 1], rates[-tenth - 1] - rates[-1]
    jumps = np.diff(rates[-2 * tenth - 1 :])
    if late <= 0 or late < 0.99 * before or not np.all(jumps < 0):
        return None
    return (
        f"at the last update the rate is {short(last)}, {percent(last / peak)} of its peak "
        f"{short(peak)}, and falling no more slowly than before. The log does not say where it "
        "was to end."
    )
