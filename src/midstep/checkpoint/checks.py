"""Checks: whether a checkpoint is of this run. All of them come before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError

__all__ = ["check_groups", "check_kinds", "check_weights"]


def check_kinds(path: Path, saved: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Refuse the state of another kind of optimizer, precision, clip rule or schedule."""
    for what, kind in ours.items():
        if saved.get(what) != kind:
            raise CheckpointError(
                f"`{path}` was saved with {what} `{saved.get(what)}`, and this run has `{kind}`, "
                "for which its state means nothing. Nothing was changed. Resume with the same."
            )


def check_weights(
    path: Path, part: str, saved: Mapping[str, Any] | None, ours: Mapping[str, Any] | None
) -> None:
    """Refuse weights of other names, shapes or dtypes; shapes are those of whole tensors."""
    saved, ours = saved or {}, ours or {}
    differences = [f"`{name}` is only in the checkpoint" for name in saved.keys() - ours.keys()]
    differences += [f"`{name}` is only in this run" for name in ours.keys() - saved.keys()]
    for name in saved.keys() & ours.keys():
        before, now = _shape(saved[name]), _shape(ours[name])
        if before != now:
            differences.append(f"`{name}` is {before} there and {now} here")
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CheckpointError(
            f"`{path}` is of another {part.replace('_', ' ')}: {'; '.join(sorted(differences)[:3])}"
            f"{more}. Nothing was changed."
        )


def check_groups(path: Path, saved: list[list[str]], ours: list[list[str]]) -> None:
    """Refuse an optimizer whose groups hold other parameters, or in another order."""
    before, now = [len(group) for group in saved], [len(group) for group in ours]
    if before != now:
        raise CheckpointError(
            f"`{path}` was saved with {before} parameters in the optimizer's groups, and this run "
            f"has {now}. Nothing was changed. Add the same groups before loading."
        )
    for index, (group, own) in enumerate(zip(saved, ours, strict=True)):
        for theirs, name in zip(group, own, strict=True):
            if theirs != name:
                raise CheckpointError(
                    f"`{path}` has `{theirs}` where group {index} of this run's optimizer has "
                    f"`{name}`, so each would go on with the other's state. Nothing was changed. "
                    "Make the groups in the same order."
                )


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
