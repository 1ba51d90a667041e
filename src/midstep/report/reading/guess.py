"""Names: which column of a foreign log is which.

A column is taken by its name alone, in the order of the patterns: the first pattern that fits a
column wins, and of several columns that fit, the one that has most values. What is guessed is said
on the page; what is guessed wrong is named by the user.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from ..run import Floats
from .errors import ReportError

__all__ = ["FIELDS", "named"]

# Names are compared in lower case, with everything but letters and digits as one underscore. A
# `train_` before and an `_step` after say nothing here; an `_epoch` mean is not an update's value.
_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "update": ("global_step", "optimizer_step", "update", "updates", "step", "steps", "iteration"),
    "loss_mean": ("loss_mean", "loss", "train_loss", "loss_train", r"\w*_train_loss", r"lm_loss"),
    "held_out": (
        r"(?:eval|val|valid|validation|test|held_out|dev)_loss(?:_mean)?",
        r"loss_(?:eval|val|valid|validation|test|dev)",
    ),
    "grad_norm": (
        r"(?:\w*_)?grad(?:ient)?_norm(?:_(?:total|global|l2|2|2_0))?",
        r"(?:\w*_)?(?:total|global)_norm",
        r"grad_2_0_norm_total",
        r"gnorm",
    ),
    "clip_coefficient": (r"clip_(?:coef|coefficient|factor|scale)",),
    "clip_max_norm": (r"(?:clip_)?max_norm", r"max_grad_norm", r"clip_threshold", r"grad_clip"),
    "lr": ("learning_rate", "lr", r"lr_[a-z]+(?:_pg1)?", r"lr_0", r"learning_rate_0", r"lr_\w+"),
    "loss_scale": (r"(?:\w*_)?loss_scale", "scale", "scaler_scale", "amp_scale"),
    "targets": (r"(?:num_)?(?:targets|tokens|samples)(?:_per_(?:step|update|batch))?", "ntokens"),
    "seconds": (
        r"(?:step|update|iter|iteration|batch)_(?:time|seconds|sec)",
        "seconds",
        r"time_per_(?:step|iteration)",
        r"s_it",
        r"sec_per_(?:step|iter)",
    ),
    "memory_bytes": ("memory_bytes", r"peak_memory_bytes", r"max_memory_allocated"),
    "noise_scale": (r"(?:gradient_)?noise_scale", "gns"),
    "update_norm": ("update_norm",),
}
FIELDS = tuple(_PATTERNS)


def named(
    found: Mapping[str, Floats], chosen: Mapping[str, str], place: str
) -> tuple[dict[str, Floats], dict[str, str]]:
    """Give each column the name it has in a run.

    Args:
        found: Columns of the log.
        chosen: Their names in the log, by the name they have in a run, where the user says so.
        place: Of the log, for messages.

    Returns:
        The columns by their names here, and their names in the log by their names here.

    Raises:
        ReportError: A name is not in the log, or is no name of a run.
    """
    for field, column in chosen.items():
        if field not in FIELDS:
            raise ReportError(
                f"`--column {field}={column}`: a run has no `{field}`. It has {', '.join(FIELDS)}."
            )
        if column not in found:
            raise ReportError(
                f"`--column {field}={column}`: `{place}` has no column `{column}`. It has "
                f"{_listed(found)}."
            )
    names = dict(chosen)
    for field, patterns in _PATTERNS.items():
        if field in names:
            continue
        free = {name: values for name, values in found.items() if name not in names.values()}
        if (name := _guessed(free, patterns)) is not None:
            names[field] = name
    return {field: found[name] for field, name in names.items()}, names


def _guessed(columns: Mapping[str, Floats], patterns: tuple[str, ...]) -> str | None:
    for pattern in patterns:
        fitting = [name for name in columns if re.fullmatch(pattern, _plain(name))]
        filled = {name: int((~np.isnan(columns[name])).sum()) for name in fitting}
        if fitting and max(filled.values()) > 0:
            return max(fitting, key=lambda name: filled[name])
    return None


def _plain(name: str) -> str:
    """Reduce a name to what it says.

    Example:
        >>> _plain("train/grad_norm"), _plain("Loss/train"), _plain("train_loss_step")
        ('grad_norm', 'loss_train', 'loss')
    """
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    plain = re.sub(r"^(?:train|training|optim|perf|metrics)_(?=[a-z])", "", plain)
    return re.sub(r"(?<=[a-z])_step$", "", plain) if plain != "global_step" else plain


def _listed(columns: Mapping[str, Floats]) -> str:
    names = sorted(columns)
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(f"`{name}`" for name in names[:20]) + more
