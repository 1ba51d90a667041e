"""Checkpoints: a run saved at a window boundary, whole or not at all, and the way back into it.

The continued run is the uninterrupted run, bit for bit: model, optimizer, schedule, loss scale,
clip statistics, clocks, random streams and the place in the data all return. A file holds plain
values and tensors only and is read with `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .blame import names_of, plain_name
from .clip.rule import Rule
from .errors import CheckpointError
from .snapshot import RandomState
from .updater import Updater

__all__ = ["load", "save"]

_FORMAT = "midstep checkpoint"
_SCHEMA = 1
# Exactly these: what inherits from them (a numpy float, an enum) is read back by running code.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype)
_NESTING = (dict, OrderedDict, Counter, list, tuple, set)


def save(
    path: str | os.PathLike[str], updater: Updater, *, extra: Mapping[str, Any] | None = None
) -> None:
    """Save a run between two windows.

    Written beside `path`, synced to disk and renamed, so that a kill at any moment leaves either
    the old checkpoint or the new one. Costs a write of weights and optimizer state, and with a
    stateful loader its own state.

    Args:
        path: The file; its folder is made.
        updater: Whose run it is.
        extra: More to keep: plain values and tensors. `load` gives it back.

    Raises:
        CheckpointError: It cannot be written; what was saved before is whole.
        WindowError: Inside a window.
        TypeError: A state holds something that a safe load could not read back.

    Example:
        >>> import midstep as ms, tempfile
        >>> model = torch.nn.Linear(2, 1)
        >>> updater = ms.Updater(model, torch.optim.AdamW(model.parameters()))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(Path(folder) / "checkpoint.pt", updater, extra={"note": "first"})
        ...     load(Path(folder) / "checkpoint.pt", updater)
        {'note': 'first'}
    """
    path = Path(path)
    content = {
        "format": _FORMAT,
        "schema": _SCHEMA,
        "kinds": _kinds(updater),
        "groups": _groups(updater),
        "model": _weights(updater.model),
        "optimizer": updater.optimizer.state_dict(),
        "averaged_model": _weights(updater.averaged_model),
        "updater": updater.state_dict(),
        "random": RandomState.capture().state_dict(),
        "extra": dict(extra or {}),
    }
    _require_plain(content, "")
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as RuntimeError
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise CheckpointError(
            f"`{path}` could not be written: {_cause(error)}. The checkpoint saved before, if any, "
            "is whole. Free space, or save to another folder."
        ) from error


def load(path: str | os.PathLike[str], updater: Updater) -> dict[str, Any]:
    """Go on from a saved run.

    Everything is checked before anything is changed. Afterwards the next `updater.windows(loader,
    ...)` reads on at the saved place.

    Args:
        path: What `save` wrote.
        updater: Made as the saved one was: same model, optimizer, precision, clip rule, schedule.

    Returns:
        The `extra` it was saved with.

    Raises:
        CheckpointError: There is none, it cannot be read, or it is of another model, optimizer,
            precision, rule, schedule or schema. Nothing was changed.

    Example:
        >>> import midstep as ms, tempfile
        >>> model = torch.nn.Linear(2, 1)
        >>> updater = ms.Updater(model, torch.optim.SGD(model.parameters()))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(Path(folder) / "checkpoint.pt", updater)
        ...     load(Path(folder) / "checkpoint.pt", updater)
        {}
    """
    path = Path(path)
    content = _read(path)
    _check_kinds(path, content["kinds"], _kinds(updater))
    pairs = [("model", updater.model), ("averaged_model", updater.averaged_model)]
    for part, module in pairs:
        _check_weights(path, part, content[part], _weights(module))
    _check_groups(path, content["groups"], _groups(updater))
    before = updater.state_dict()
    try:
        updater.load_state_dict(content["updater"])
    except (KeyError, TypeError, ValueError) as error:
        del before["cursor"]  # it is loaded last, so it still is where it was
        updater.load_state_dict(before)
        raise CheckpointError(
            f"`{path}` does not fit this updater: {_cause(error)}. Nothing was changed. Make clip "
            "rule, schedule and precision as they were when it was saved."
        ) from error
    for part, module in pairs:
        if isinstance(module, nn.Module):
            module.load_state_dict(
                {name: content[part][plain] for plain, name in _plain_names(module).items()}
            )
    updater.optimizer.load_state_dict(content["optimizer"])
    RandomState.from_state_dict(content["random"]).restore()
    extra: dict[str, Any] = content["extra"]
    return extra


def _kinds(updater: Updater) -> dict[str, str]:
    """What must be of the same kind for the saved state to mean the same."""
    return {
        "optimizer": type(updater.optimizer).__name__,
        "precision": type(updater.precision).__name__,
        "clip rule": _kind_of_rule(updater.clip),
        "schedule": updater.rates.kind,
    }


def _kind_of_rule(rule: Rule) -> str:
    inner = ", ".join(_kind_of_rule(part) for part in getattr(rule, "rules", ()))
    return f"{type(rule).__name__}({inner})" if inner else type(rule).__name__


def _groups(updater: Updater) -> list[list[str]]:
    """Name the parameters of each group; the optimizer's own state knows them by position only."""
    groups = updater.optimizer.param_groups
    return [names_of(updater.model, group["params"]) for group in groups]


def _weights(module: object) -> dict[str, Any] | None:
    if module is None:
        return None
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"`averaged_model` is a `{type(module).__name__}`, which is no `nn.Module`, so its "
            "average would be lost. Use `torch.optim.swa_utils.AveragedModel`."
        )
    state = module.state_dict()
    return {plain: state[name] for plain, name in _plain_names(module).items()}


def _plain_names(module: nn.Module) -> dict[str, str]:
    """Map names without what compiling and wrapping prepend to those of this module.

    So a compiled run goes on uncompiled and back. Where two would become one, all stay as they are.
    """
    names = list(module.state_dict())
    plain = {plain_name(name): name for name in names}
    return plain if len(plain) == len(names) else {name: name for name in names}


def _require_plain(value: object, path: str) -> None:
    """Find what could be pickled now and not be read back safely, before it is too late."""
    if isinstance(value, _NESTING):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            _require_plain(item, f"{path}[{key!r}]")
        if type(value) in _NESTING:
            return
    elif type(value) in _PLAIN or isinstance(value, Tensor):
        return
    raise TypeError(
        f"The state at `{path}` is a `{type(value).__name__}`, which a safe load would refuse to "
        "read back. Keep plain numbers, strings, lists, dicts and tensors in states that are saved."
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        _check_sums(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"`{path}`: there is no such checkpoint.") from None
    except Exception as error:  # random bytes make an unpickler raise almost anything
        raise CheckpointError(
            f"`{path}` cannot be read as a checkpoint: {_cause(error)}. It may be cut short, or "
            "written by something else. Nothing was changed."
        ) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(
            f"`{path}` is no midstep checkpoint. Nothing was changed. For bare weights use "
            "`model.load_state_dict`."
        )
    schema = content.get("schema")
    if schema != _SCHEMA:
        raise CheckpointError(
            f"`{path}` has schema {schema}, this version of midstep reads {_SCHEMA}. Nothing was "
            "changed. Load it with the version that saved it."
        )
    return content


def _check_sums(path: Path) -> None:
    """Hold every part of the archive against its checksum, which `torch.load` leaves unread.

    Costs a read of the file. Without it, a bit flipped in the weights would be trained on.
    """
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of `{damaged}` is wrong")


def _check_kinds(path: Path, saved: Mapping[str, str], ours: Mapping[str, str]) -> None:
    for what, kind in ours.items():
        if saved.get(what) != kind:
            raise CheckpointError(
                f"`{path}` was saved with {what} `{saved.get(what)}`, and this run has `{kind}`, "
                "for which its state means nothing. Nothing was changed. Resume with the same."
            )


def _check_weights(
    path: Path, part: str, saved: Mapping[str, Any] | None, ours: Mapping[str, Any] | None
) -> None:
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


def _check_groups(path: Path, saved: list[list[str]], ours: list[list[str]]) -> None:
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


def _cause(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _sync_folder(folder: Path) -> None:
    # Without it the rename itself could be lost with the power.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
