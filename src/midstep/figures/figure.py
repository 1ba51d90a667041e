"""A figure: what was published, what the library computes today, and whether the two agree."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

__all__ = ["Compute", "Figure", "all_of", "close", "entries"]

Compute: TypeAlias = "Callable[[], Figure]"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of the table.

    Attributes:
        id: As the documents' figures are numbered here.
        setup: What is computed.
        published: As it was published, by name; empty where no figure was promised.
        computed: The same names, computed by the library just now; it may hold more.
        agrees: Whether the two agree, and what must hold beside them holds.
        note: What the library does where the documents show what goes wrong.
    """

    id: str
    setup: str
    published: dict[str, Any]
    computed: dict[str, Any]
    agrees: bool
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Give it as plain values that strict JSON holds."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain


def close(computed: float, published: float, *, within: float) -> bool:
    """Whether a number is the published one, to so much.

    Args:
        computed: Just now.
        published: In a document.
        within: The largest difference that the kernels explain.

    Example:
        >>> close(206.3521, 206.352, within=0.001), close(math.nan, 1.0, within=1.0)
        (True, False)
    """
    return abs(computed - published) <= within


def all_of(computed: Sequence[float], published: Sequence[float], *, within: float) -> bool:
    """Whether each number is the published one, and there are as many.

    Args:
        computed: Just now.
        published: In a document.
        within: The largest difference that the kernels explain.
    """
    return len(computed) == len(published) and all(
        close(ours, theirs, within=within) for ours, theirs in zip(computed, published, strict=True)
    )


def entries(values: dict[str, Any]) -> str:
    """Spell named values in a line.

    Args:
        values: Numbers, lists of numbers, words.

    Example:
        >>> entries({"norm": 206.35205, "parts": [0.5, 1.0]})
        'norm 206.352; parts 0.5 1'
    """
    return "; ".join(f"{name} {_spell(value)}" for name, value in values.items())


def _spell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return " ".join(_spell(item) for item in value)
    return str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
