"""Batches of any shape: how many rows they hold, and how to cut them along rows.

A batch is any nesting of tensors in dicts, other mappings (such as tokenizer output), tuples, named
tuples, lists and dataclasses. The first dimension of every tensor is the rows; 0-d tensors, numbers
and strings belong to the whole batch and are shared by its pieces.

A list may hold one item per row instead (captions, images of unequal size, one dict an image). It
is read so when its items have no rows of their own, and beside tensors when its own length is their
rows and that of its items is not. A tuple holds parts, except that strings in it, as many as there
are rows, are one per row: `default_collate` makes those. What can be read both ways is not cut.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["cut_rows", "join_rows", "map_tensors", "num_rows", "take_rows", "tensors_of"]

Batch = TypeVar("Batch")


def num_rows(batch: object) -> int:
    """Count the rows of a batch.

    Args:
        batch: Any nesting the module docstring names.

    Raises:
        ValueError: It holds nothing with rows, its parts disagree, or it can be read in two ways.
        TypeError: It holds something that cannot be cut along rows.

    Example:
        >>> import torch
        >>> num_rows({"x": torch.zeros(4, 2), "captions": ["a", "b", "c", "d"], "scale": 0.5})
        4
    """
    places = list(_places(batch, ""))
    # From the surest evidence to the least: tensors, then lists that can only be one item per row.
    for kind in ("tensor", "items", "parts", "strings"):
        lengths = {place.path or "batch": place.rows for place in places if place.kind == kind}
        if lengths:
            break
    else:
        if places:
            raise _unclear(places[0])
        raise ValueError(
            f"`{type(batch).__name__}` batch: no tensor in it has rows, so it cannot be counted or "
            "cut. Give batches that hold tensors whose first dimension is the rows."
        )
    if len(set(lengths.values())) > 1:
        raise _disagreement(lengths)
    (rows,) = set(lengths.values())
    for place in places:
        if place.kind != "strings" and rows not in {place.as_items, place.as_parts}:
            raise ValueError(
                f"`{place.path or 'batch'}` is a list of {place.as_items} items beside {rows} "
                "rows, so it cannot be cut along rows. Make it one item per row, or a tuple if it "
                "is shared."
            )
    return rows


def cut_rows(batch: Batch, rows: int) -> list[Batch]:
    """Cut a batch into pieces of at most `rows` rows, in order; the last may be shorter.

    Tensors are sliced, so no row is copied.

    Args:
        batch: Any nesting the module docstring names.
        rows: Most rows of a piece; at least 1.

    Raises:
        ValueError: It holds nothing with rows, its parts disagree, or it can be read in two ways.
        TypeError: It holds something that cannot be cut along rows.

    Example:
        >>> import torch
        >>> [piece["x"].tolist() for piece in cut_rows({"x": torch.arange(5)}, 2)]
        [[0, 1], [2, 3], [4]]
    """
    total = num_rows(batch)
    if total <= rows:
        return [batch]
    return [_taken(batch, total, slice(i, i + rows)) for i in range(0, total, rows)]


def take_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Take some rows of a batch, in any order and as often as they are named. Copies them.

    Args:
        batch: Any nesting the module docstring names.
        rows: Their positions.

    Raises:
        ValueError: It holds nothing with rows, its parts disagree, or it can be read in two ways.
        TypeError: It holds something that cannot be cut along rows.

    Example:
        >>> import torch
        >>> take_rows({"x": torch.arange(5), "captions": list("abcde")}, [4, 0])
        {'x': tensor([4, 0]), 'captions': ['e', 'a']}
    """
    taken: Batch = _taken(batch, num_rows(batch), list(rows))
    return taken


def join_rows(batches: Sequence[Batch]) -> Batch:
    """Join batches of one form into one, the inverse of cutting. Copies them.

    Args:
        batches: At least one. What is not cut along rows must be the same in all of them.

    Raises:
        ValueError: Their tensors differ in another dimension than the rows, or in what is shared.

    Example:
        >>> import torch
        >>> join_rows([{"x": torch.arange(2), "y": ["a", "b"]}, {"x": torch.arange(1), "y": ["c"]}])
        {'x': tensor([0, 1, 0]), 'y': ['a', 'b', 'c']}
    """
    return _joined(batches, [num_rows(batch) for batch in batches], "")  # type: ignore[no-any-return]


def tensors_of(batch: object) -> list[torch.Tensor]:
    """List the tensors of a batch, in order.

    Args:
        batch: Any nesting the module docstring names.
    """
    if isinstance(batch, torch.Tensor):
        return [batch]
    return [tensor for _, part in _children(batch) or () for tensor in tensors_of(part)]


def map_tensors(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Give a batch with each of its tensors changed.

    Args:
        batch: Any nesting the module docstring names.
        change: Of one tensor.
    """
    mapped: Batch = _mapped(batch, change)
    return mapped


def _mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return _rebuild_mapping(batch, {key: _mapped(v, change) for key, v in batch.items()})
    parts = _children(batch)
    if parts is None:
        return batch
    return _rebuild(batch, {name: _mapped(value, change) for name, value in parts})


class _Place(NamedTuple):
    """A tensor or a list somewhere in a batch, and how many rows it has in each reading.

    `kind` is "tensor"; or of a list: "items" without rows of their own; "parts", tensors that agree
    on theirs; "unclear", nestings of one form, or tensors that disagree; "strings" in a tuple.
    """

    path: str
    kind: str
    as_parts: int = -1
    as_items: int = -1

    @property
    def rows(self) -> int:
        """The rows in the likelier reading."""
        return self.as_items if self.as_parts < 0 else self.as_parts


def _places(batch: object, path: str) -> Iterator[_Place]:
    if isinstance(batch, PackedSequence) or getattr(batch, "is_nested", False):
        raise TypeError(
            f"`{path or 'batch'}` is a {type(batch).__name__}, which has no rows to cut along. Pad "
            "it to a rectangular tensor, or give windows by `size=` instead of `rows=`."
        )
    if _is_array(batch):
        if batch.shape:  # type: ignore[attr-defined]
            yield _Place(path, "tensor", as_parts=int(batch.shape[0]))  # type: ignore[attr-defined]
        return
    listing = _listing(batch, path)
    if listing is not None:
        yield listing
        return
    for name, child in _children(batch) or ():
        yield from _places(child, f"{path}.{name}" if path else name)


def _listing(batch: object, path: str) -> _Place | None:
    """Read a list whose items may be one per row; None for what can only be a nesting."""
    if isinstance(batch, tuple):
        is_strings = batch and all(isinstance(item, (str, bytes)) for item in batch)
        return _Place(path, "strings", as_items=len(batch)) if is_strings else None
    if not isinstance(batch, list) or not batch:
        return None
    is_arrays = all(_is_array(item) for item in batch)
    if not is_arrays:
        if not all(_is_array(item) or _children(item) is not None for item in batch):
            return _Place(path, "items", as_items=len(batch))
        if len({_form(item) for item in batch}) > 1:
            return None
    lengths = {place.rows for item in batch for place in _places(item, "")}
    if not lengths:
        return _Place(path, "items", as_items=len(batch))
    if len(lengths) > 1:
        return _Place(path, "unclear", as_items=len(batch))
    kind = "parts" if is_arrays else "unclear"
    return _Place(path, kind, as_parts=lengths.pop(), as_items=len(batch))


def _is_column(place: _Place, rows: int) -> bool:
    """Whether a list holds one item per row, in a batch of so many rows that fits it."""
    if place.kind == "unclear" and place.as_items == place.as_parts:
        raise _unclear(place)
    return place.as_items == rows and place.as_parts != rows


def _taken(batch: Any, total: int, rows: slice | list[int]) -> Any:
    if _is_array(batch):
        return batch[rows] if batch.shape else batch
    listing = _listing(batch, "")
    if listing is not None and _is_column(listing, total):
        if isinstance(rows, slice):
            return batch[rows]
        return type(batch)(batch[row] for row in rows)
    if isinstance(batch, Mapping):
        return _rebuild_mapping(
            batch, {key: _taken(value, total, rows) for key, value in batch.items()}
        )
    parts = _children(batch)
    if parts is None:
        return batch
    return _rebuild(batch, {name: _taken(value, total, rows) for name, value in parts})


def _joined(batches: Sequence[Any], totals: Sequence[int], path: str) -> Any:
    first = batches[0]
    if len(batches) == 1:
        return first
    if _is_array(first) and first.shape:
        if len({tuple(batch.shape[1:]) for batch in batches}) > 1:
            shapes = ", ".join(f"{list(batch.shape)}" for batch in batches)
            raise ValueError(
                f"`{path or 'batch'}` has the shapes {shapes}, which differ in more than the rows, "
                "so they cannot be joined. Pad them to one length."
            )
        return torch.cat(list(batches)) if isinstance(first, torch.Tensor) else _stacked(batches)
    listing = _listing(first, "")
    if listing is not None and _is_column(listing, totals[0]):
        return type(first)(item for batch in batches for item in batch)
    parts = [dict(_children(batch) or ()) for batch in batches]
    if not parts[0]:
        return first
    joined = {
        name: _joined([part[name] for part in parts], totals, f"{path}.{name}" if path else name)
        for name in parts[0]
    }
    if isinstance(first, Mapping):
        return _rebuild_mapping(first, {key: joined[str(key)] for key in first})
    return _rebuild(first, joined)


def _stacked(batches: Sequence[Any]) -> Any:
    import numpy as np

    return np.concatenate(list(batches))


def _rebuild(batch: Any, pieces: dict[str, Any]) -> Any:
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


def _form(item: object) -> tuple[Any, ...]:
    """What rows of one kind have in common: type and names, or type and number of parts."""
    return (type(item), *(name for name, _ in _children(item) or ()))


def _unclear(place: _Place) -> ValueError:
    held = "unequal numbers of rows" if place.as_parts < 0 else f"{place.as_parts} rows each"
    return ValueError(
        f"A list in the batch has {place.as_items} items that hold {held}, so it may be one item "
        "per row, or parts to be cut alike; a wrong guess would pair rows that do not belong "
        "together. Make it a tuple if it holds parts, a numpy array of dtype object if it holds "
        "one item per row."
    )


def _disagreement(lengths: Mapping[str, int]) -> ValueError:
    seen = ", ".join(f"`{path}` {length}" for path, length in lengths.items())
    return ValueError(
        f"The parts of a batch disagree on its rows: {seen}. Cutting it would pair rows that do "
        "not belong together. Give every tensor the rows as its first dimension, or make shared "
        "ones 0-d."
    )
