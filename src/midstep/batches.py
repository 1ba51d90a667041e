"""Batches of any shape: how many rows they hold, and how to cut them along rows.

A batch is any nesting of tensors in dicts, other mappings (such as tokenizer output), tuples, named
tuples, lists and dataclasses. The first dimension of every tensor is the rows; 0-d tensors, numbers
and strings belong to the whole batch and are shared by its pieces. A list of one item per row (of
captions, say, or of per-image dicts) is cut like a tensor.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

from torch.nn.utils.rnn import PackedSequence

__all__ = ["cut_rows", "num_rows"]

Batch = TypeVar("Batch")


def num_rows(batch: object) -> int:
    """Count the rows of a batch.

    Args:
        batch: Any nesting the module docstring names.

    Raises:
        ValueError: It holds nothing with rows, or its parts disagree.

    Example:
        >>> import torch
        >>> num_rows({"x": torch.zeros(4, 2), "captions": ["a", "b", "c", "d"], "scale": 0.5})
        4
    """
    lengths = dict(_tensor_lengths(batch, ""))
    if not lengths:
        lengths = {path: len(column) for path, column in _columns(batch, "")}
    if not lengths:
        raise ValueError(
            f"`{type(batch).__name__}` batch: no tensor in it has rows, so it cannot be counted or "
            "cut. Give batches that hold tensors whose first dimension is the rows."
        )
    if len(set(lengths.values())) > 1:
        seen = ", ".join(f"`{path or 'batch'}` {length}" for path, length in lengths.items())
        raise ValueError(
            f"The parts of a batch disagree on its rows: {seen}. Cutting it would pair rows that "
            "do not belong together. Give every tensor the rows as its first dimension, or make "
            "shared ones 0-d."
        )
    return next(iter(lengths.values()))


def cut_rows(batch: Batch, rows: int) -> list[Batch]:
    """Cut a batch into pieces of at most `rows` rows, in order; the last may be shorter.

    Tensors are sliced, so no row is copied.

    Args:
        batch: Any nesting the module docstring names.
        rows: Most rows of a piece; at least 1.

    Raises:
        ValueError: It holds nothing with rows, or its parts disagree.
        TypeError: It holds something that cannot be cut along rows.

    Example:
        >>> import torch
        >>> [piece["x"].tolist() for piece in cut_rows({"x": torch.arange(5)}, 2)]
        [[0, 1], [2, 3], [4]]
    """
    total = num_rows(batch)
    if total <= rows:
        return [batch]
    return [_slice(batch, total, start, start + rows) for start in range(0, total, rows)]


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "__getitem__")


def _children(batch: object) -> Iterator[tuple[str, Any]] | None:
    """The named parts of a nesting, or None for a leaf."""
    if isinstance(batch, Mapping):
        return ((str(key), value) for key, value in batch.items())
    if isinstance(batch, (tuple, list)):
        return ((str(index), value) for index, value in enumerate(batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return ((f.name, getattr(batch, f.name)) for f in dataclasses.fields(batch))
    return None


def _tensor_lengths(batch: object, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(batch, PackedSequence) or getattr(batch, "is_nested", False):
        raise TypeError(
            f"`{path or 'batch'}` is a {type(batch).__name__}, which has no rows to cut along. Pad "
            "it to a rectangular tensor, or give windows by `size=` instead of `rows=`."
        )
    if _is_array(batch):
        if batch.shape:  # type: ignore[attr-defined]
            yield path, int(batch.shape[0])  # type: ignore[attr-defined]
        return
    if isinstance(batch, list) and _is_column(batch):
        return
    for name, child in _children(batch) or ():
        yield from _tensor_lengths(child, f"{path}.{name}" if path else name)


def _is_column(items: list[Any]) -> bool:
    """Whether a list holds one item per row, instead of being a nesting of its own.

    `default_collate` makes `[x, y]` of tuples, whose tensors agree on their length; per-row items
    are no tensors, or tensors and dicts that do not agree.
    """
    if not all(_is_array(item) or _children(item) is not None for item in items):
        return True
    if not all(isinstance(item, Mapping) or _is_array(item) for item in items):
        return False
    lengths = {length for item in items for _, length in _tensor_lengths(item, "")}
    return len(lengths) > 1


def _columns(batch: object, path: str) -> Iterator[tuple[str, list[Any]]]:
    if isinstance(batch, list) and _is_column(batch):
        yield path, batch
        return
    for name, child in _children(batch) or ():
        yield from _columns(child, f"{path}.{name}" if path else name)


def _slice(batch: Any, total: int, start: int, stop: int) -> Any:
    if _is_array(batch):
        return batch[start:stop] if batch.shape else batch
    if isinstance(batch, list) and _is_column(batch):
        if len(batch) != total:
            raise ValueError(
                f"A list of {len(batch)} items lies beside tensors of {total} rows, so it cannot "
                "be cut along rows. Make it one item per row, or a tuple if it is shared."
            )
        return batch[start:stop]
    if isinstance(batch, Mapping):
        return _rebuild_mapping(
            batch, {key: _slice(value, total, start, stop) for key, value in batch.items()}
        )
    parts = _children(batch)
    if parts is None:
        return batch
    pieces = {name: _slice(value, total, start, stop) for name, value in parts}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*pieces.values())
    if isinstance(batch, (tuple, list)):
        return type(batch)(pieces.values())
    clone = copy.copy(batch)
    for name, piece in pieces.items():
        object.__setattr__(clone, name, piece)  # also right for frozen dataclasses
    return clone


def _rebuild_mapping(batch: Mapping[Any, Any], pieces: dict[Any, Any]) -> Mapping[Any, Any]:
    if not isinstance(batch, MutableMapping):
        return type(batch)(pieces)  # type: ignore[call-arg]
    clone = copy.copy(batch)  # keeps what a tokenizer's output carries beside its tensors
    for key, piece in pieces.items():
        clone[key] = piece
    return clone
