"""Tensor by tensor: which carry the norm, which are dead, which move too much or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ..run import Floats, Run, Samples
from .finding import Finding
from .measures import percent, short

__all__ = ["dead_layers", "one_carries_the_norm", "update_ratios"]

_NUM_SAMPLES = 5
_NUM_TENSORS = 4
# Of the square of the norm. The head of a small classifier often has 80 % of it; with 95 % one
# threshold for all is a threshold for that tensor.
_CARRIES = 0.95
# An update is usually about a thousandth of its weights (a rule of thumb). Two and three orders
# away the weights are thrown about, or stand still.
_TOO_LARGE, _TOO_SMALL = 0.1, 1e-6
_NUM_NAMED = 4


def one_carries_the_norm(run: Run) -> Iterator[Finding]:
    """One tensor has nearly all of the gradient.

    Args:
        run: The run.
    """
    table = run.by_name.get("grad_norms", {})
    names, updates, norms = _matrix(table)
    if len(names) < _NUM_TENSORS or len(updates) < _NUM_SAMPLES:
        return
    squares = np.square(norms)
    total = squares.sum(axis=0)
    kept = np.isfinite(total) & (total > 0)
    if not kept.any():
        return
    shares = np.median(squares[:, kept] / total[kept], axis=1)
    top = int(np.argmax(shares))
    if shares[top] < _CARRIES:
        return
    yield Finding(
        rule="one-layer-carries-the-norm",
        title=f"`{names[top]}` carries the norm",
        seen=f"in the median of {int(kept.sum()):,} updates `{names[top]}` has "
        f"{percent(float(shares[top]))} of the square of the norm, and the other {len(names) - 1} "
        "tensors share the rest. Whether an update is clipped, and by how much, is decided by it.",
        look="its rows that are rare or large (an embedding, a head), its initial size, or a rule "
        "that clips by group or by tensor.",
        figures={"tensor": names[top], "share": float(shares[top])},
        updates=(int(updates[0]), int(updates[-1])),
    )


def dead_layers(run: Run) -> Iterator[Finding]:
    """Tensors whose gradient is exactly zero from some update on.

    Args:
        run: The run.
    """
    table = run.by_name.get("grad_norms", {})
    dead: dict[str, tuple[int, int]] = {}
    for name, samples in table.items():
        live = np.flatnonzero(samples.values != 0)  # nan is not zero
        begin = int(live[-1]) + 1 if len(live) else 0
        # Half of the samples, so that a part that is used now and then is not dead.
        if len(samples) - begin >= max(_NUM_SAMPLES, len(samples) // 2):
            dead[name] = int(samples.updates[begin]), int(samples.updates[-1])
    if not dead or len(dead) == len(table):  # all of them is a norm of zero, which has a rule
        return
    shown = ", ".join(f"`{name}` from update {begin:,}" for name, (begin, _) in _first(dead))
    more = f" and {len(dead) - _NUM_NAMED:,} more" if len(dead) > _NUM_NAMED else ""
    yield Finding(
        rule="dead-layers",
        title=f"{len(dead):,} of {len(table):,} tensors have no gradient",
        seen=f"the gradient is exactly zero, up to the last one observed: {shown}{more}.",
        look="a branch that is not taken, a `detach`, ReLUs that never fire, or parts that should "
        "not be in the optimizer.",
        figures={"number": len(dead), "of": len(table), "first": next(iter(dead))},
        updates=(min(begin for begin, _ in dead.values()), max(end for _, end in dead.values())),
    )


def update_ratios(run: Run) -> Iterator[Finding]:
    """The step of a tensor is far larger, or far smaller, against its weights than is usual.

    Args:
        run: The run.
    """
    table = run.by_name.get("update_to_weight", {})
    medians: dict[str, float] = {}
    for name, samples in table.items():
        values = samples.values[np.isfinite(samples.values)]
        # A bias begins at zero, so any step is large against it.
        if len(values) >= _NUM_SAMPLES and "bias" not in name.rpartition(".")[2]:
            medians[name] = float(np.median(values))
    still = _still(run)
    groups = {
        "too-large": {name: ratio for name, ratio in medians.items() if ratio > _TOO_LARGE},
        "too-small": {
            name: ratio
            for name, ratio in medians.items()
            if ratio < _TOO_SMALL and name not in still
        },
    }
    for way, found in groups.items():
        if not found:
            continue
        worst = sorted(found, key=lambda name: found[name], reverse=way == "too-large")
        shown = ", ".join(f"`{name}` {short(found[name])}" for name in worst[:_NUM_NAMED])
        more = f" and {len(found) - _NUM_NAMED:,} more" if len(found) > _NUM_NAMED else ""
        large = way == "too-large"
        yield Finding(
            rule=f"update-ratio-{way}",
            title=f"{len(found):,} of {len(medians):,} tensors "
            + ("move too much" if large else "hardly move"),
            seen="the median of norm of the update over norm of the weights: "
            f"{shown}{more}. Usual is about 0.001; "
            + (f"above {_TOO_LARGE:g} it is" if large else f"below {_TOO_SMALL:g} it is")
            + (" thrown about." if large else " standing still."),
            look="the rate, and that of its parameter group"
            + (
                "; warm-up; the initial size of the weights."
                if large
                else "; a schedule at its end."
            ),
            figures={"number": len(found), "worst": worst[0], "ratio": found[worst[0]]},
            updates=_span(table),
        )


def _still(run: Run) -> set[str]:
    """Tensors without a gradient do not move, and another rule says so."""
    table = run.by_name.get("grad_norms", {})
    return {name for name, samples in table.items() if np.median(samples.values) == 0}


def _matrix(table: Mapping[str, Samples]) -> tuple[list[str], Floats, Floats]:
    """Names, updates and values of the tensors that were observed at the same updates as most."""
    if not table:
        return [], np.zeros(0), np.zeros((0, 0))
    most = max(table.values(), key=len)
    names = [name for name, samples in table.items() if len(samples) == len(most)]
    return names, most.updates, np.array([table[name].values for name in names])


def _first(dead: Mapping[str, tuple[int, int]]) -> list[tuple[str, tuple[int, int]]]:
    return list(dead.items())[:_NUM_NAMED]


def _span(table: Mapping[str, Samples]) -> tuple[int, int]:
    longest = max(table.values(), key=len)
    return int(longest.updates[0]), int(longest.updates[-1])
