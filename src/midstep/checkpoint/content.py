"""Content: all that a checkpoint holds of one rank, as plain values and tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..blame import names_of, plain_name
from ..clip.rule import Rule
from ..ranks import Ranks
from ..snapshot import RandomState
from ..updater import Updater

__all__ = [
    "FORMAT",
    "MODULES",
    "SCHEMA",
    "content_of",
    "groups_of",
    "kinds_of",
    "modules_of",
    "plain_names",
    "ranks_of",
    "require_plain",
    "weights_of",
]

FORMAT = "midstep checkpoint"
SCHEMA = 1
MODULES = ("model", "averaged_model")
# Exactly these: what inherits from them (a numpy float, an enum) is read back by running code.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype)
_NESTING = (dict, OrderedDict, Counter, list, tuple, set)


def content_of(updater: Updater, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Collect what is saved. Copies no tensor.

    Raises:
        WindowError: Inside a window.
        TypeError: The averaged model is no module.
    """
    updater.settle()  # may move the rates, which the optimizer's state holds
    content = {
        "format": FORMAT,
        "schema": SCHEMA,
        "kinds": kinds_of(updater),
        "groups": groups_of(updater),
        "model": weights_of(updater.model),
        "optimizer": updater.optimizer.state_dict(),
        "averaged_model": weights_of(updater.averaged_model),
        "updater": updater.state_dict(),
        "random": RandomState.capture().state_dict(),
        "extra": dict(extra or {}),
    }
    if ranks_of(updater) is not None:
        content["divisor"] = updater._feed.divisor  # noqa: SLF001 - it is state, and nobody else's
    return content


def ranks_of(updater: Updater) -> Ranks | None:
    """Find the other ranks of a run; None where there is no process group."""
    return updater._ranks  # noqa: SLF001 - nobody else's business


def modules_of(updater: Updater) -> Iterator[tuple[str, nn.Module]]:
    """Give the modules whose weights are saved, each with the name of its part."""
    for part in MODULES:
        module = getattr(updater, part)
        if isinstance(module, nn.Module):
            yield part, module


def kinds_of(updater: Updater) -> dict[str, str]:
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


def groups_of(updater: Updater) -> list[list[str]]:
    """Name the parameters of each group; the optimizer's own state knows them by position only."""
    groups = updater.optimizer.param_groups
    return [names_of(updater.model, group["params"]) for group in groups]


def weights_of(module: object) -> dict[str, Any] | None:
    """Give a module's state by names that wrapping and compiling do not change."""
    if module is None:
        return None
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"`averaged_model` is a `{type(module).__name__}`, which is no `nn.Module`, so its "
            "average would be lost. Use `torch.optim.swa_utils.AveragedModel`."
        )
    state = module.state_dict()
    return {plain: state[name] for plain, name in plain_names(module).items()}


def plain_names(module: nn.Module) -> dict[str, str]:
    """Map names without what compiling and wrapping prepend to those of this module.

    So a compiled run goes on uncompiled and back. Where two would become one, all stay as they are.
    """
    names = list(module.state_dict())
    plain = {plain_name(name): name for name in names}
    return plain if len(plain) == len(names) else {name: name for name in names}


def require_plain(value: object, path: str = "") -> None:
    """Find what could be pickled now and not be read back safely, before it is too late.

    Raises:
        TypeError: There is something.
    """
    if isinstance(value, _NESTING):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            require_plain(item, f"{path}[{key!r}]")
        if type(value) in _NESTING:
            return
    elif type(value) in _PLAIN or isinstance(value, Tensor):
        return
    raise TypeError(
        f"The state at `{path}` is a `{type(value).__name__}`, which a safe load would refuse to "
        "read back. Keep plain numbers, strings, lists, dicts and tensors in states that are saved."
    )
