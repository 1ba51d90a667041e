"""Columns that grow row by row: rows may lack fields, and bring new ones at any time."""

from __future__ import annotations

import array
import math
from collections.abc import Mapping

import numpy as np

from ..run import Floats, Samples

__all__ = ["Columns", "Table", "number_of"]

_SPELT = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class Columns:
    """Arrays of float64 of one length. Costs 8 bytes a row and column.

    Example:
        >>> columns = Columns()
        >>> columns.add({"loss": 2.0})
        >>> columns.add({"norm": 1.0})
        >>> {name: values.tolist() for name, values in columns.arrays().items()}
        {'loss': [2.0, nan], 'norm': [nan, 1.0]}
    """

    def __init__(self) -> None:
        self.length = 0
        self._arrays: dict[str, array.array[float]] = {}

    def add(self, row: Mapping[str, float]) -> None:
        """Append a row."""
        for name, value in row.items():
            self._growing(name).append(value)
        self.length += 1

    def arrays(self) -> dict[str, Floats]:
        """Give every column, nan where a row had nothing."""
        for name in self._arrays:
            _fill(self._arrays[name], self.length)
        return {name: np.array(values) for name, values in self._arrays.items()}

    def _growing(self, name: str) -> array.array[float]:
        column = self._arrays.get(name)
        if column is None:
            column = self._arrays[name] = array.array("d")
        if len(column) < self.length:
            _fill(column, self.length)
        return column


class Table:
    """Values by name that come now and then, such as a norm for each tensor."""

    def __init__(self) -> None:
        self._rows: dict[str, array.array[float]] = {}
        self._values: dict[str, array.array[float]] = {}

    def add(self, row: int, values: Mapping[str, float]) -> None:
        """Note what was measured in a row.

        Args:
            row: Which one, from 0; not below the last one.
            values: By name.
        """
        for name, value in values.items():
            if name not in self._rows:
                self._rows[name], self._values[name] = array.array("d"), array.array("d")
            self._rows[name].append(row)
            self._values[name].append(value)

    def samples(self, updates: Floats) -> dict[str, Samples]:
        """Give what was measured of each name.

        Args:
            updates: The number of the update of each row.
        """
        return {
            name: Samples(updates[np.array(rows).astype(int)], np.array(self._values[name]))
            for name, rows in self._rows.items()
        }


def number_of(value: object) -> float | None:
    """Give a value as a number, None where it is none. inf and nan may be spelt as strings.

    Example:
        >>> number_of(True), number_of("inf"), number_of("2e-3"), number_of("adam")
        (1.0, inf, 0.002, None)
    """
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str):
        try:
            return _SPELT[value] if value in _SPELT else float(value)
        except ValueError:
            return None
    return None


def _fill(column: array.array[float], length: int) -> None:
    column.extend([math.nan] * (length - len(column)))
