"""Facts: what a run comes to in numbers, whether anything was found or not."""

from __future__ import annotations

import numpy as np

from ...arithmetic import EffectiveBatch
from ..run import Run
from .clipping import clipping_words
from .measures import finite, short, stepped

__all__ = ["facts_of"]


def facts_of(run: Run) -> dict[str, str]:
    """Say what the log holds, and nothing that is not in it.

    Args:
        run: The run.
    """
    facts = {"updates": _updates(run)}
    if run.has("loss_mean"):
        losses = finite(run.column("loss_mean"))
        facts["loss"] = (
            f"{losses[-1]:.4g} at last, {losses[0]:.4g} at first" if len(losses) else "-"
        )
    if run.held_out is not None:
        values = run.held_out.values
        best = f", {finite(values).min():.4g} at best" if len(finite(values)) else ""
        facts["held-out loss"] = f"{values[-1]:.4g} at last{best}"
    _, norms = stepped(run, "grad_norm")
    if len(norms):
        facts["gradient norm"] = (
            f"median {short(float(np.median(norms)))}, largest {short(norms.max())}"
        )
    if (words := clipping_words(run)) is not None:
        facts["clipped"] = words
    if run.has("lr"):
        rates = finite(run.column("lr"))
        facts["rate"] = f"{rates.max():.3g} at most, {rates[-1]:.3g} at last"
    if run.has("targets"):
        facts["targets"] = f"{np.nansum(run.column('targets')):,.0f}"
        _, counts = stepped(run, "targets")
        if len(counts):
            facts["effective batch"] = str(EffectiveBatch.of_counts(counts.tolist()))
    if run.has("decay_exponent"):
        groups = (n for n in run.columns if n.split(".")[0] == "decay_exponent")
        last = [f"{finite(run.column(name))[-1]:.3g}" for name in groups if run.has(name)]
        facts["decay exponent"] = f"{', '.join(last)}: sum of rate x decay, by group"
    speeds = finite(run.targets_per_second)
    if len(speeds):
        facts["speed"] = f"{np.median(speeds):,.0f} targets/s"
    elif run.has("seconds"):
        facts["speed"] = f"{np.nanmedian(run.column('seconds')):.3g} s an update"
    return facts


def _updates(run: Run) -> str:
    words = f"{int(run.applied.sum()):,} applied"
    skipped = ", ".join(
        f"{number:,} {name.removeprefix('skipped_')}" for name, number in run.skipped.items()
    )
    return words + (f", {sum(run.skipped.values()):,} skipped ({skipped})" if skipped else "")
