"""Layers whose rows depend on each other: found by changing other rows, not by their names.

Each call of each module is made again on its own inputs, in which half of the rows are those of the
other half. Where an output row moves although its own inputs did not, the module makes rows depend
on each other. Of nested modules the innermost is named. Which dimension of a tensor is the rows is
found out too: by a run of one row more, it is the one that grew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..snapshot import RandomState
from .borrowing import State

__all__ = ["Asked", "Crossing", "RowsOf", "crossing_layers"]

Note = Callable[[str, int, Any, Any], None]
Ask = Callable[[str, int, Any, Any, Callable[..., Any]], None]

_NOISE = 2.0**6  # units of roundoff: kernels round a row alike whatever the others are, or nearly


@dataclasses.dataclass(frozen=True, slots=True)
class Crossing:
    """A module that makes rows depend on each other.

    Attributes:
        name: Its name in the model; empty for the model itself.
        kind: Its class.
        moved: How far an output moved, as a share of the largest one.
    """

    name: str
    kind: str
    moved: float


class RowsOf:
    """Where the rows are in the tensors of each call: by what grew with one row more.

    Attributes:
        calls: Shapes of inputs and outputs of each call, by module and number of the call.
    """

    def __init__(self) -> None:
        self.calls: dict[tuple[str, int], tuple[list[Any], list[Any]]] = {}

    def note(self, name: str, call: int, inputs: Any, outputs: Any) -> None:
        """Keep the shapes of one call."""
        self.calls[name, call] = (_shapes(inputs), _shapes(outputs))


class Asked(NamedTuple):
    """What the modules of a model answered.

    Attributes:
        crossing: The innermost modules that make rows depend on each other.
        judged: Names of those that have rows in what they give, so that they could be judged.
    """

    crossing: list[Crossing]
    judged: set[str]


def crossing_layers(model: nn.Module, run: Callable[[list[int]], object], num_rows: int) -> Asked:
    """Ask every module whether it makes rows depend on each other.

    Costs two forwards, and five more calls of each module for each level of nesting.

    Args:
        model: Its modules are asked.
        run: Computes the loss of some rows.
        num_rows: Rows of the batch.
    """
    one_more = RowsOf()
    with _watching(model, one_more.note), torch.no_grad():
        run([*range(num_rows), 0])
    found: dict[str, Crossing] = {}

    def ask(name: str, call: int, inputs: Any, outputs: Any, again: Callable[..., Any]) -> None:
        shapes = one_more.calls.get((name, call))
        if shapes is None:
            return
        answers = [_moved(inputs, outputs, again, shapes, num_rows, source) for source in sources]
        if all(answer is None for answer in answers):
            return
        judged.add(name)
        moved = max(answer or 0.0 for answer in answers)
        if moved > 0 and (name not in found or found[name].moved < moved):
            found[name] = Crossing(name, type(modules[name]).__name__, moved)

    judged: set[str] = set()
    sources = _sources(num_rows)
    modules = dict(model.named_modules())
    with _watching(model, None, ask), torch.no_grad():
        run(list(range(num_rows)))
    innermost = [
        crossing
        for name, crossing in found.items()
        if not any(other != name and _is_inside(other, name) for other in found)
    ]
    return Asked(innermost, judged)


def _sources(num_rows: int) -> list[list[int]]:
    """Where each row is taken from: half of them, or one of them, is another row's copy."""
    half = num_rows // 2
    rows = list(range(num_rows))
    return [
        [*(half + i % (num_rows - half) for i in range(half)), *rows[half:]],
        [*rows[:half], *(i % half for i in range(num_rows - half))],
        [num_rows - 1, *rows[1:]],
        [1, *rows[1:]],
        [*rows[:-1], 0],
    ]


def _is_inside(inner: str, outer: str) -> bool:
    return outer == "" or inner.startswith(f"{outer}.")


class _Watch:
    """Sees every call of every module; with `ask`, lets it be made again.

    What a call made again does to buffers, attributes and random streams is undone.
    """

    def __init__(self, note: Note | None, ask: Ask | None) -> None:
        self._note = note
        self._ask = ask
        self._num_calls: dict[str, int] = {}
        self._draws: dict[str, list[RandomState]] = {}
        self._is_asking = False

    def before(self, name: str, *_: object) -> None:
        """Note where the random streams are before a call."""
        if self._ask is not None and not self._is_asking:
            self._draws.setdefault(name, []).append(RandomState.capture())

    def after(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """See a call, with what it was given and what it gave."""
        if self._is_asking:
            return
        call = self._num_calls[name] = self._num_calls.get(name, -1) + 1
        if self._note is not None:
            self._note(name, call, (args, kwargs), output)
        if self._ask is None:
            return
        state, start = State(module), self._draws[name].pop()

        def again(inputs: Any) -> Any:
            start.restore()
            try:
                return module.forward(*inputs[0], **inputs[1])
            finally:
                state.restore()

        self._is_asking = True
        try:
            self._ask(name, call, (args, kwargs), output, again)
        finally:
            state.random.restore()
            self._is_asking = False


@contextlib.contextmanager
def _watching(model: nn.Module, note: Note | None, ask: Ask | None = None) -> Iterator[None]:
    watch = _Watch(note, ask)
    handles = []
    try:
        for name, module in model.named_modules():
            before, after = (functools.partial(f, name) for f in (watch.before, watch.after))
            handles.append(module.register_forward_pre_hook(before))
            handles.append(module.register_forward_hook(after, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _moved(  # noqa: PLR0917 - a call, how to make it again, and where its rows are
    inputs: Any,
    outputs: Any,
    again: Callable[..., Any],
    shapes: tuple[list[Any], list[Any]],
    num_rows: int,
    source: list[int],
) -> float | None:
    """How far outputs of rows that were kept move when the others are replaced; None without."""
    kept = [row for row, origin in enumerate(source) if row == origin]
    leaves, form = tree_flatten(inputs)
    if len(leaves) != len(shapes[0]):
        return None
    spots = [rows_dims(t, shape, num_rows) for t, shape in zip(leaves, shapes[0], strict=True)]
    if not any(spots):
        return None
    pairs = zip(leaves, spots, strict=True)
    replaced = [taken(t, spot, source) if spot else t for t, spot in pairs]
    try:
        found = tree_leaves(again(tree_unflatten(replaced, form)))
    except Exception:  # noqa: BLE001 - a module that refuses these inputs says nothing about rows
        return None
    due = tree_leaves(outputs)
    if not len(due) == len(found) == len(shapes[1]):
        return None
    moves = []
    for old, new, shape in zip(due, found, shapes[1], strict=True):
        spot = rows_dims(old, shape, num_rows)
        if spot and isinstance(new, Tensor) and new.shape == old.shape:
            before, after = (taken(t, spot, kept) for t in (old, new))
            moves.append(relative_move(before, after))
    return max(moves, default=None)


def rows_dims(leaf: Any, shape_of_more: Any, num_rows: int) -> list[tuple[int, int]]:
    """Find the dimensions that grew with one row more, and how many entries a row has along each.

    Two of them are a table of each row against each: an entry of it belongs to two rows.
    """
    if not isinstance(leaf, Tensor) or shape_of_more is None or leaf.ndim != len(shape_of_more):
        return []
    return [
        (dim, size // num_rows)
        for dim, (size, more) in enumerate(zip(leaf.shape, shape_of_more, strict=True))
        if size != more and size % num_rows == 0 and more == size // num_rows * (num_rows + 1)
    ]


def relative_move(old: Tensor, new: Tensor, noise: float = _NOISE) -> float:
    """How far a tensor moved, as a share of its largest entry; 0 within so many roundoffs."""
    if not old.is_floating_point():
        return float(not torch.equal(old, new))
    if not old.numel():
        return 0.0
    largest = max(float(old.abs().max()), float(new.abs().max()))
    moved = float((old - new).abs().max())
    if not moved > noise * torch.finfo(old.dtype).eps / 2 * largest:
        return 0.0
    return moved / largest


def taken(tensor: Tensor, spots: list[tuple[int, int]], rows: list[int]) -> Tensor:
    """Take some rows of a tensor, along every dimension that has them."""
    for dim, many in spots:
        moved = tensor.movedim(dim, 0)
        rest = moved.shape[1:]
        picked = moved.reshape(moved.shape[0] // many, many, *rest)[rows]
        tensor = picked.reshape(len(rows) * many, *rest).movedim(0, dim)
    return tensor


def _shapes(nested: Any) -> list[Any]:
    return [leaf.shape if isinstance(leaf, Tensor) else None for leaf in tree_leaves(nested)]
