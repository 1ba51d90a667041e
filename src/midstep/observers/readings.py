"""Readings: from numbers that may lie on an accelerator to the fields of a record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .observer import Reading

__all__ = ["Unread", "fields_of", "joined"]


def fields_of(readings: Sequence[Reading], known: Mapping[str, Any]) -> Mapping[str, Any]:
    """Make the fields of a record, without waiting for an accelerator.

    Args:
        readings: What the observers measured, whole.
        known: Fields that are known already.

    Returns:
        A dict where all numbers are on the host; else a mapping that is read when it is asked.
    """
    unread = Unread(readings, known)
    on_host = all(
        r.numbers.is_cpu if isinstance(r.numbers, Tensor) else not callable(r.numbers)
        for r in readings
    )
    return dict(unread) if on_host else unread


def joined(fields: Mapping[str, Any], known: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add fields that are known to those of a record, without reading what is not read yet.

    Args:
        fields: As `fields_of` made them.
        known: What is added.
    """
    if not isinstance(fields, Unread):
        return {**fields, **known}
    fields.add(known)
    return fields


class Unread(Mapping[str, Any]):
    """Fields whose numbers are still on a device. The first look at any of them is one host sync.

    Args:
        readings: What was measured.
        known: Fields that are known already.
    """

    __slots__ = ("_fields", "_readings")

    def __init__(self, readings: Sequence[Reading], known: Mapping[str, Any]) -> None:
        self._readings: list[Reading] = list(readings)
        self._fields: dict[str, Any] = dict(known)

    def __getitem__(self, name: str) -> Any:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __repr__(self) -> str:
        return repr(self._read())

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (self._read(),)

    def add(self, known: Mapping[str, Any]) -> None:
        """Take fields that are known already. No host sync."""
        self._fields.update(known)

    def _read(self) -> dict[str, Any]:
        if self._readings:
            readings, self._readings = self._readings, []
            for reading, numbers in zip(readings, _all_read(readings), strict=True):
                self._fields.update(reading.fields(numbers))
        return self._fields


def _all_read(readings: Sequence[Reading]) -> list[Sequence[float]]:
    """Bring all numbers to the host, in one transfer a device."""
    found: list[Sequence[float]] = [() for _ in readings]
    by_device: dict[torch.device, list[int]] = {}
    for index, reading in enumerate(readings):
        if isinstance(reading.numbers, Tensor):
            by_device.setdefault(reading.numbers.device, []).append(index)
        else:
            found[index] = reading.numbers() if callable(reading.numbers) else reading.numbers
    for indices in by_device.values():
        parts = [r.numbers for i in indices if isinstance((r := readings[i]).numbers, Tensor)]
        numbers = torch.cat(parts).tolist()
        for index, part in zip(indices, parts, strict=True):
            found[index], numbers = numbers[: len(part)], numbers[len(part) :]
    return found
