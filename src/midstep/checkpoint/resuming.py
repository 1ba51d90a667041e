"""Resuming: a checkpoint is read to the end and checked, and only then is anything changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ..blame import plain_name
from ..errors import CheckpointError
from ..ranks import Ranks
from ..snapshot import RandomState
from ..updater import Updater
from .checks import check_groups, check_kinds, check_weights
from .content import (
    MODULES,
    groups_of,
    kinds_of,
    modules_of,
    plain_names,
    ranks_of,
    weights_of,
)
from .file import read_content
from .layout import Layout, Progress, moved
from .together import cause_of, together

__all__ = ["content_for", "take"]


class _Saved(Protocol):
    """A checkpoint that was opened, its tensors not read yet."""

    content: dict[str, Any]
    layout: Layout
    progress: list[Progress]

    @property
    def keys_of_one_rank(self) -> set[str]: ...

    def fill(self, rooms: Mapping[str, Tensor]) -> None: ...


def content_for(path: Path, updater: Updater) -> dict[str, Any]:
    """Read what a checkpoint holds for this rank, and check that it fits. Changes nothing.

    Costs host memory of what this rank holds: weights and optimizer state, whole or in parts.

    Raises:
        CheckpointError: It cannot be read, or is of another run.
    """
    ranks = ranks_of(updater)
    if ranks is None and not path.is_dir():
        content = read_content(path)
        _check(path, content, updater)
        return content
    saved, ours = _opened(path, ranks), Layout.of(ranks)
    _check(path, saved.content, updater)
    if saved.layout == ours:
        return _filled(saved, updater)
    _check_movable(path, saved, updater)
    cursor = saved.content["updater"]["cursor"]
    place = moved(path, cursor, saved.progress, saved.layout, ours)
    content = _filled(saved, updater)
    return {**content, "updater": {**content["updater"], "cursor": place}, "random": None}


def _opened(path: Path, ranks: Ranks | None) -> _Saved:
    if not path.is_dir():
        from .one_file import OneFile

        return OneFile(path)
    from .folder import Folder  # a second's worth of torch

    return Folder(path, Layout.of(ranks), 0 if ranks is None else ranks.world.rank)


def _check(path: Path, content: Mapping[str, Any], updater: Updater) -> None:
    check_kinds(path, content["kinds"], kinds_of(updater))
    for part in MODULES:
        check_weights(path, part, content[part], weights_of(getattr(updater, part)))
    check_groups(path, content["groups"], groups_of(updater))


def _check_movable(path: Path, saved: _Saved, updater: Updater) -> None:
    """Refuse parameters of which each rank had its own; of buffers the first rank's are taken."""
    parameters = {
        f"{part}/{plain_name(name)}"
        for part, module in modules_of(updater)
        for name, _ in module.named_parameters()
    }
    for key in sorted(saved.keys_of_one_rank):
        if key in parameters or key.startswith("optimizer/"):
            raise CheckpointError(
                f"`{path}` was saved on {saved.layout.num_ranks} ranks that held different numbers "
                f"in `{key}`: a parameter of each rank's own, or replicas that have drifted. No "
                "other number of ranks can go on with them. Nothing was changed. Resume on as many."
            )


def _filled(saved: _Saved, updater: Updater) -> dict[str, Any]:
    """Read every tensor into room that is placed as this run's own are."""
    from .tensors import Place, replaced, room_for

    weights = {part: weights_of(module) for part, module in modules_of(updater)}
    groups = updater.optimizer.param_groups
    parameters: list[Tensor] = [p for group in groups for p in group["params"]]
    rooms: dict[str, Tensor] = {}

    def make_room(place: Place, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if isinstance(place.owner, int):
            like = parameters[place.owner]
        else:
            like = (weights[place.part] or {})[place.owner]
        rooms[place.key] = room_for(tensor, like)
        return rooms[place.key]

    content = replaced(saved.content, make_room)
    saved.fill(rooms)
    return content


def take(path: Path, updater: Updater, content: Mapping[str, Any]) -> None:
    """Go on from what was read.

    Raises:
        CheckpointError: A state does not fit its stage; all stages are as they were.
    """
    ranks = ranks_of(updater)
    before = together(ranks, updater.state_dict)
    # It comes last, alone: an open pass could not be put back.
    state = {key: value for key, value in content["updater"].items() if key != "cursor"}
    del before["cursor"]
    try:
        together(ranks, lambda: _take_state(path, updater, state))
    except Exception:
        updater.load_state_dict(before)
        raise
    updater.load_state_dict(content["updater"])
    for part, module in modules_of(updater):
        module.load_state_dict(
            {name: content[part][plain] for plain, name in plain_names(module).items()}
        )
    updater.optimizer.load_state_dict(content["optimizer"])
    if "divisor" in content:
        updater._feed.divisor = content["divisor"]  # noqa: SLF001 - see `content_of`
    if content["random"] is not None:
        RandomState.from_state_dict(content["random"]).restore()


def _take_state(path: Path, updater: Updater, state: Mapping[str, Any]) -> None:
    try:
        updater.load_state_dict(state)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"`{path}` does not fit this updater: {cause_of(error)}. Nothing was changed. Make "
            "clip rule, schedule and precision as they were when it was saved."
        ) from error
