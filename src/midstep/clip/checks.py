"""Refusals that the clip rules share: at construction, with the value and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from torch import Tensor

__all__ = ["check_between", "check_count", "listed"]


def check_between(
    name: str, value: float, rule: str, low: float, high: float = math.inf, *, why: str
) -> None:
    """Refuse a number that is not between two others; both ends are outside.

    Raises:
        ValueError: It is not between them.
        TypeError: It is no number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"`{rule}({name}={value!r})`: must be a number, because {why}.")
    if not low < value < high:  # written so that nan fails too
        bounds = f"greater than {low:g}" + (f" and less than {high:g}" if high < math.inf else "")
        raise ValueError(f"`{rule}({name}={value!r})`: must be {bounds}, because {why}.")


def check_count(name: str, value: int, rule: str, least: int, *, why: str) -> None:
    """Refuse what is no count, or too small a one.

    Raises:
        ValueError: It is less than `least`.
        TypeError: It is no whole number.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{rule}({name}={value!r})`: must be a whole number, because {why}.")
    if value < least:
        raise ValueError(f"`{rule}({name}={value})`: must be at least {least}, because {why}.")


def listed(parameters: Tensor | Iterable[Tensor], place: str) -> list[Tensor]:
    """List parameters, of which one alone will do; a generator that gives none was read before.

    Raises:
        ValueError: It is an iterator without a parameter in it.
    """
    if isinstance(parameters, Tensor):
        return [parameters]
    found = list(parameters)
    if not found and isinstance(parameters, Iterator):
        raise ValueError(
            f"{place} got a `{type(parameters).__name__}` without a parameter in it, so nothing "
            "would come of it. A generator such as `model.parameters()` is empty once it was read; "
            "pass a fresh one or a list."
        )
    return found
