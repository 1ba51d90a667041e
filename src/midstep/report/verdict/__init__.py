"""The verdict: what the record of a run shows, with its figures, and no more than it shows.

Each rule is a function `run -> findings` and stands with those of its idea in one file. A rule that
lacks what it reads finds nothing, and says so in `Judgement.not_judged`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ..run import Run
from .clipping import clipped_often, pinned
from .facts import facts_of
from .finding import Finding, Judgement
from .layers import dead_layers, one_carries_the_norm, update_ratios
from .norms import growing, near_zero
from .pace import noise_scale, schedule, swinging_targets, throughput
from .skips import nonfinite, scale_collapse, skipped_in_a_row
from .spikes import drift, lone_spikes

__all__ = ["RULES", "Finding", "Judgement", "judge"]

Rule = Callable[[Run], Iterable[Finding]]

# What is most likely to explain the rest comes first.
RULES: tuple[Rule, ...] = (
    nonfinite,
    scale_collapse,
    skipped_in_a_row,
    pinned,
    near_zero,
    drift,
    lone_spikes,
    growing,
    clipped_often,
    dead_layers,
    one_carries_the_norm,
    update_ratios,
    schedule,
    swinging_targets,
    noise_scale,
    throughput,
)
# One of the first says why one of the second holds, so the second is not said.
_EXPLAINS = {
    "drift-after-spike": ("norm-grows",),
    "not-finite": ("drift-after-spike", "norm-grows"),
    "norm-near-zero-frozen": ("update-ratio-too-small",),
    "norm-near-zero-masked": ("update-ratio-too-small", "targets-swing"),
    "norm-near-zero-converged": ("update-ratio-too-small",),
    "norm-near-zero-underflow": ("update-ratio-too-small", "dead-layers"),
}
_NEEDS = {
    "norm": (("grad_norm",), "no gradient norm"),
    "clipping": (("clipped",), "neither clips nor a threshold (`--max-norm` tells it)"),
    "schedule": (("lr",), "no rate"),
    "targets": (("targets",), "no number of targets"),
    "speed": (("seconds",), "no seconds"),
    "noise scale": (("noise_scale",), "no noise scale, which an observer measures"),
}


def judge(run: Run) -> Judgement:
    """Judge a run by its record.

    Args:
        run: The run.

    Returns:
        The findings, none for a clean run; facts; and what could not be judged.
    """
    found = [finding for rule in RULES for finding in rule(run)]
    explained = {name for finding in found for name in _EXPLAINS.get(finding.rule, ())}
    return Judgement(
        run=run.name,
        num_updates=len(run),
        findings=tuple(finding for finding in found if finding.rule not in explained),
        facts=facts_of(run),
        not_judged=_not_judged(run),
    )


def _not_judged(run: Run) -> dict[str, str]:
    missing = {
        name: f"the log has {what}"
        for name, (columns, what) in _NEEDS.items()
        if not run.has(*columns) and not (name == "clipping" and (~np.isnan(run.clipped)).any())
    }
    for name, table in (("layers", "grad_norms"), ("update sizes", "update_to_weight")):
        if table not in run.by_name:
            missing[name] = "the log has nothing by tensor, which an observer records"
    return missing
