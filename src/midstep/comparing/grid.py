"""The grid: what is varied, and the cells that come of it. No torch."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cli.options import Options, PrecisionName, ScheduleName

__all__ = ["Cell", "Grid", "Variant", "parse_axis"]


def _norm(text: str) -> float:
    return math.inf if text == "none" else float(text)


# What may be varied, and how it is read. Everything else is the same in every cell.
_AXES: Mapping[str, Callable[[str], Any]] = {
    "clip": _norm,
    "lr": float,
    "schedule": ScheduleName,
    "warmup": int,
    "minimum": float,
    "precision": PrecisionName,
    "size": int,
    "rows": int,
    "targets": int,
}


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """Read `lr=1e-3,3e-3`: the name of an option, and the values it takes in turn.

    Args:
        text: As it was typed.

    Raises:
        ValueError: The option cannot be varied, a value cannot be read, or one stands twice.

    Example:
        >>> parse_axis("clip=none,0.5")
        ('clip', [inf, 0.5])
    """
    name, sign, listed = text.partition("=")
    if not sign or name not in _AXES:
        raise ValueError(
            f"`--vary {text}`: write NAME=VALUE,VALUE with a NAME of {', '.join(_AXES)}"
        )
    words = [word.strip() for word in listed.split(",")]
    try:
        values = [_AXES[name](word) for word in words]
    except ValueError:
        raise ValueError(f"`--vary {text}`: a value of `{name}` cannot be read") from None
    if len(set(values)) < len(values):
        raise ValueError(f"`--vary {text}`: a value stands twice, and would be run for nothing")
    return name, values


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One choice of what is varied.

    Attributes:
        values: Option to value.
    """

    values: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """Give it in words, such as `clip=0.5 lr=0.003`; `recipe` where nothing is varied."""
        words = [f"{key}={_word(value)}" for key, value in self.values]
        return " ".join(words) or "recipe"

    @property
    def folder(self) -> str:
        """Give the name as that of a folder."""
        return re.sub(r"[^A-Za-z0-9.=+-]+", "_", self.name)


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One run of the grid: a variant and a seed.

    Attributes:
        variant: What is particular to it.
        seed: Of weights, data order and dropout; the same seeds for every variant.
        options: What the run is begun with.
        path: Its folder.
    """

    variant: Variant
    seed: int
    options: Options
    path: Path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Every combination of the values, each with every seed.

    Attributes:
        recipe: A built-in name or the path of a `.py` file.
        axes: Option to its values.
        base: What every cell has in common; its `seed` is the first seed.
        num_seeds: Seeds of each variant.
        path: The folder of the whole comparison.
        common: More of what every cell has in common: what fits only beside a value that is varied,
            such as a `warmup` of varied schedules.

    Raises:
        ValueError: An option is both varied and given, or there is nothing to vary.
    """

    recipe: str
    axes: Mapping[str, Sequence[Any]]
    base: Options
    num_seeds: int
    path: Path
    common: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        given = {**dataclasses.asdict(self.base), **self.common}
        both = [name for name in self.axes if given[name] is not None]
        if both:
            raise ValueError(
                f"`{both[0]}` is both varied and given, so that it is not clear what is meant. "
                "Leave one out"
            )
        if not self.axes:
            raise ValueError("nothing is varied. Give at least one `--vary NAME=VALUE,VALUE`")
        if self.num_seeds < 1:
            raise ValueError(f"`--seeds {self.num_seeds}`: at least 1")

    def variants(self) -> list[Variant]:
        """Give every combination, the last axis fastest."""
        names = list(self.axes)
        return [
            Variant(tuple(zip(names, values, strict=True)))
            for values in itertools.product(*self.axes.values())
        ]

    def cells(self, *, steps: Callable[[Variant], int]) -> list[Cell]:
        """Give every run, seed by seed, so that a grid that is stopped has compared something.

        Args:
            steps: Applied updates of a variant, so that all see as many targets.

        Raises:
            ValueError: Options of a variant exclude each other.
        """
        first = self.base.seed or 0
        return [
            Cell(
                variant,
                seed,
                dataclasses.replace(
                    self.base,
                    **self.common,
                    **dict(variant.values),
                    seed=seed,
                    steps=steps(variant),
                ),
                self.path / variant.folder / f"seed-{seed}",
            )
            for seed in range(first, first + self.num_seeds)
            for variant in self.variants()
        ]


def _word(value: Any) -> str:
    if value == math.inf:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
