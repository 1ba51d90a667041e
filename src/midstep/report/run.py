"""A run as columns: one array a field, one entry an update, nan where nothing was recorded.

This module decides the names under which everything that was recorded is found again, and what can
be derived from them. Where the values come from is left to `reading`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["APPLIED", "Flags", "Floats", "Run", "Samples"]

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

APPLIED = "applied"
_MAX_NORM = re.compile(r"^By(?:Global|Group|Tensor)Norm\(max_norm=([0-9.e+-]+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Samples:
    """A quantity that was measured now and then.

    Attributes:
        updates: When: numbers of updates, rising.
        values: What was measured.
    """

    updates: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run, whoever recorded it.

    Attributes:
        name: What it is called on the page.
        path: Where it was read.
        kind: What wrote it, in words.
        columns: One number an update, by name; `update` is always there.
        verdicts: How each update ended. A log that does not say has `applied` throughout.
        by_name: What was measured of each tensor or stage: field, then name, then samples.
        held_out: Losses on held-out data.
        about: How the run was begun, from `run.json`; empty where there is none.
        is_norm_true: Whether `grad_norm` is known to be the norm before clipping.
        is_running: Whether a process still holds the run.
        max_norm: The threshold, where the reader was told it.
        names: Of the columns in the log, by the name they have here; empty for midstep's own.
    """

    name: str
    path: Path
    kind: str
    columns: Mapping[str, Floats]
    verdicts: tuple[str, ...]
    by_name: Mapping[str, Mapping[str, Samples]] = dataclasses.field(default_factory=dict)
    held_out: Samples | None = None
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_norm_true: bool = False
    is_running: bool = False
    max_norm: float | None = None
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns["update"])

    def has(self, *names: str) -> bool:
        """Whether something was recorded in each of these columns."""
        return all(name in self.columns and bool(self._has(name)) for name in names)

    def column(self, name: str) -> Floats:
        """Give a column; nan throughout where it was not recorded."""
        found = self.columns.get(name)
        return np.full(len(self), np.nan) if found is None else found

    @property
    def updates(self) -> Floats:
        """The number of each update."""
        return self.columns["update"]

    @functools.cached_property
    def applied(self) -> Flags:
        """Which updates changed the weights."""
        return np.array([verdict == APPLIED for verdict in self.verdicts], dtype=bool)

    @functools.cached_property
    def skipped(self) -> Mapping[str, int]:
        """How many updates ended otherwise, by verdict."""
        names = [verdict for verdict in self.verdicts if verdict != APPLIED]
        return {name: names.count(name) for name in sorted(set(names))}

    @functools.cached_property
    def threshold(self) -> Floats:
        """The clip threshold of each update: recorded, derived from a clip, told, or nan.

        A clipped gradient has the length of the threshold: `grad_norm * clip_coefficient`.
        """
        limit = self.column("clip_max_norm").copy()
        if self.max_norm is not None:
            limit[np.isnan(limit)] = self.max_norm
        norm, coefficient = self.column("grad_norm"), self.column("clip_coefficient")
        is_open = np.isnan(limit) & (self.column("clipped") == 1)
        limit[is_open] = (norm * coefficient)[is_open]
        fixed = _MAX_NORM.match(str(self.about.get("settings", {}).get("clip", "")))
        if fixed and np.isfinite(float(fixed[1])):
            limit[np.isnan(limit)] = float(fixed[1])
        limit[~np.isfinite(limit)] = np.nan
        known = limit[~np.isnan(limit)]
        if len(known) and np.ptp(known) <= 1e-4 * known.max():  # a product of two rounded numbers
            limit[np.isnan(limit)] = np.median(known)
        return limit

    @functools.cached_property
    def coefficient(self) -> Floats:
        """What each gradient was multiplied by: recorded, or from norm and threshold, or nan."""
        recorded = self.column("clip_coefficient")
        if self.has("clip_coefficient"):
            return recorded
        norm, limit = self.column("grad_norm"), self.threshold
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(np.isnan(norm), np.nan, np.minimum(1.0, limit / norm))

    @functools.cached_property
    def clipped(self) -> Floats:
        """1 where the clip rule fired, 0 where it did not, nan where the log does not tell."""
        if self.has("clipped"):
            return self.column("clipped")
        return np.where(np.isnan(self.coefficient), np.nan, self.coefficient < 1.0)

    @functools.cached_property
    def targets_per_second(self) -> Floats:
        """Targets of the first loss term over seconds, for each update."""
        seconds = self.column("seconds")
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = self.column("targets") / np.where(seconds > 0, seconds, np.nan)
        return np.asarray(rate, dtype=np.float64)

    def _has(self, name: str) -> bool:
        return not bool(np.all(np.isnan(self.columns[name])))
