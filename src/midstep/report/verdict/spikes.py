"""Spikes: updates whose norm stands out, whether the run came back, and which microbatch it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from ..run import Run
from .finding import Finding
from .measures import NORMAL, percent, short, times, trailing_median

__all__ = ["drift", "lone_spikes"]

_WINDOW = 20  # updates before it that an update is compared with
# Both must hold: five times the usual norm, since anything less is the noise of small batches; and
# eight sigmas of the logarithm, since where norms swing by a factor of two, five-fold is nothing.
_RATIO, _SIGMAS = 5.0, 8.0
_BACK = 3.0  # a spike is over when the norm is below three times the usual again,
_SOON = 5  # within so many updates
# A run that drifted stays above what it had by more than noise and by a tenth of it.
_DRIFT_SIGMAS, _DRIFT_SHARE = 4.0, 0.1
_AFTER = 20  # updates that must have come after a spike to say that it never came back
_MANY = 0.05  # of all updates: not lone any more
_NUM_NAMED = 5


@dataclasses.dataclass(frozen=True, slots=True)
class _Spike:
    row: int  # in the run
    norm: float
    usual: float
    is_over: bool


def lone_spikes(run: Run) -> Iterator[Finding]:
    """Single updates whose norm is many times the usual, and the next ones are as before.

    Args:
        run: The run.
    """
    drifted = [spike.row for spike, _, _ in _drifts(run)]
    spikes = [
        spike
        for spike in _spikes(run)
        # What comes within a window after a drift began belongs to it.
        if spike.is_over and not any(0 <= spike.row - row <= _WINDOW for row in drifted)
    ]
    if not spikes:
        return
    largest = max(spikes, key=lambda spike: spike.norm / spike.usual)
    share = len(spikes) / len(run)
    shown = sorted(spikes, key=lambda spike: -spike.norm / spike.usual)[:_NUM_NAMED]
    named = "; ".join(_words(run, spike) for spike in sorted(shown, key=lambda spike: spike.row))
    more = f"; and {len(spikes) - len(shown):,} more" if len(spikes) > len(shown) else ""
    number = "a lone spike" if len(spikes) == 1 else f"{len(spikes):,} lone spikes"
    title = f"{number} of the norm"
    if share > _MANY:
        title = f"{len(spikes):,} spikes of the norm, {percent(share)} of all updates"
    microbatch = run.column("outlier_microbatch")[largest.row]
    figures: dict[str, float | str] = {
        "number": len(spikes),
        "largest": largest.norm,
        "ratio": largest.norm / largest.usual,
        "update": float(run.updates[largest.row]),
    }
    if np.isfinite(microbatch):
        figures["microbatch"] = float(microbatch)
    yield Finding(
        rule="lone-spikes",
        title=title,
        seen=f"{named}{more}. Within {_SOON} updates the norm is back.",
        look="the batch of these updates"
        + ("" if np.isfinite(microbatch) else "; observers name the microbatch")
        + ". Clipping bounds what it does; `SkipSpike` leaves it out.",
        figures=figures,
        updates=(int(run.updates[spikes[0].row]), int(run.updates[spikes[-1].row])),
    )


def drift(run: Run) -> Iterator[Finding]:
    """After a spike the loss never came back to what it was.

    Args:
        run: The run.
    """
    found = _drifts(run)
    if not found:
        return
    spike, before, after = found[0]
    update = int(run.updates[spike.row])
    yield Finding(
        rule="drift-after-spike",
        title=f"the loss did not come back after the spike at update {update:,}",
        seen=f"{_words(run, spike)}. The median loss of the {_WINDOW} updates before is "
        f"{short(before)}, and of all that follow {short(after)}: {times(after / before)}.",
        look="a checkpoint before it, to go on without that batch; the rate, and a clip or "
        "`SkipSpike` if there was none.",
        figures={
            "update": update,
            "norm": spike.norm,
            "usual_norm": spike.usual,
            "loss_before": before,
            "loss_after": after,
        },
        updates=(update, int(run.updates[-1])),
    )


def _spikes(run: Run) -> list[_Spike]:
    norms = run.column("grad_norm")
    rows = np.flatnonzero(np.isfinite(norms) & (norms > 0))
    values = np.log(norms[rows])
    usual, width = trailing_median(values, _WINDOW)
    # Twenty norms may agree by chance; a tenth is the noise of a norm over a fair batch.
    width = np.maximum(width, 0.1)
    with np.errstate(invalid="ignore"):
        out = (values - usual > np.log(_RATIO)) & (values - usual > _SIGMAS * width)
    found: list[_Spike] = []
    for at in np.flatnonzero(out):
        if found and rows[at] - found[-1].row <= _SOON:
            continue  # the same one, still on its way down
        after = values[at + 1 : at + 1 + _SOON]
        is_over = bool(len(after)) and float(after.min()) < usual[at] + np.log(_BACK)
        row, norm = int(rows[at]), float(norms[rows[at]])
        found.append(_Spike(row, norm, float(np.exp(usual[at])), is_over))
    return found


def _drifts(run: Run) -> list[tuple[_Spike, float, float]]:
    losses = run.column("loss_mean")
    found = []
    for spike in _spikes(run):
        if not run.applied[spike.row]:
            continue  # it touched nothing
        before = losses[max(0, spike.row - _WINDOW) : spike.row]
        after = losses[spike.row + 1 :]
        before, after = before[np.isfinite(before)], after[np.isfinite(after)]
        if len(before) < _WINDOW // 2 or len(after) < _AFTER:
            continue
        middle, late = float(np.median(before)), float(np.median(after[-len(after) // 2 :]))
        noise = NORMAL * float(np.median(np.abs(before - middle)))
        if late > middle + max(_DRIFT_SIGMAS * noise, _DRIFT_SHARE * abs(middle)):
            found.append((spike, middle, float(np.median(after))))
    return found


def _words(run: Run, spike: _Spike) -> str:
    row = spike.row
    words = (
        f"update {int(run.updates[row]):,}: norm {short(spike.norm)}, "
        f"{times(spike.norm / spike.usual)} the median of the {_WINDOW} before"
    )
    microbatch, apart = run.column("outlier_microbatch")[row], run.column("microbatch_spread")[row]
    if np.isfinite(microbatch):
        words += f", in microbatch {int(microbatch)}"
        number = run.column("num_microbatches")[row]
        words += f" of {int(number)}" if np.isfinite(number) else ""
        words += f" ({times(float(apart))} the median microbatch)" if np.isfinite(apart) else ""
    if not run.applied[row]:
        words += ", not applied"
    return words
