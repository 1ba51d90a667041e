"""Parameters: numbers for tensors and objects, and what changed in `.grad` since the last look."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..written import written

__all__ = ["Numbers", "Parameters", "Watched", "params_of", "ratio_of", "sample_of", "shape_of"]

SAMPLE = 16  # elements of a probed gradient
NUM_PROBES = 3  # probed gradients an optimizer

Mark = tuple[int, int] | None  # identity and version of a gradient; None where there is none


class Numbers:
    """A small integer for each object, the same as long as the object lives, never used again."""

    __slots__ = ("_known", "_next")

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._next = 0

    def find(self, thing: Any) -> int | None:
        """Return the number of an object that has one."""
        entry = self._known.get(id(thing))
        return None if entry is None else entry[0]

    def of(self, thing: Any) -> int:
        """Return the number of an object, a new one at first."""
        key = id(thing)
        entry = self._known.get(key)
        if entry is None:
            known = self._known

            def forget(ref: weakref.ref[Any]) -> None:
                if key in known and known[key][1] is ref:
                    del known[key]

            entry = known[key] = (self._next, weakref.ref(thing, forget))
            self._next += 1
        return entry[0]


@written
class Watched:
    """An optimizer, its number, and the parameters it held at the last look."""

    number: int
    ref: weakref.ref[Optimizer]
    shape: tuple[tuple[int, int], ...]
    keys: frozenset[int]
    probes: tuple[int, ...] = ()


class Parameters:
    """The parameters of every living optimizer, and the state of their gradients.

    A look reads two attributes a parameter (0.2 microseconds), and with `closely` the values of at
    most three small samples an optimizer.
    """

    __slots__ = (
        "_by_grad",
        "_by_memory",
        "_flat",
        "_index",
        "_keys",
        "_sets",
        "marks",
        "numbers",
        "samples",
        "watched",
    )

    def __init__(self) -> None:
        self.numbers = Numbers()
        self.watched: dict[int, Watched] = {}  # by the identity of the optimizer
        self._flat: list[Tensor] = []
        self._keys: list[int] = []
        self._index: dict[int, int] = {}
        self._by_grad: tuple[dict[int, Mark], dict[int, int]] | None = None
        self._by_memory: dict[tuple[int, torch.Size], int] | None = None
        self._sets: dict[frozenset[int], frozenset[int]] = {}
        self.marks: dict[int, Mark] = {}
        self.samples: dict[int, list[float]] = {}

    def intern(self, keys: Iterable[int]) -> frozenset[int]:
        """Return an equal set that is stored once."""
        found = frozenset(keys)
        return self._sets.setdefault(found, found)

    def keys_of(self, tensors: Iterable[Any]) -> frozenset[int]:
        """Return the numbers of those tensors that an optimizer holds."""
        find = self.numbers.find
        return self.intern(key for t in tensors if (key := find(t)) is not None)

    def refresh(self) -> None:
        """Read the parameters of all optimizers again if any group changed."""
        stale = False
        for identity, watched in list(self.watched.items()):
            optimizer = watched.ref()
            if optimizer is None:
                del self.watched[identity]
                stale = True
            elif (shape := shape_of(optimizer)) != watched.shape:
                watched.shape = shape
                watched.keys = self.intern(self.numbers.of(p) for p in params_of(optimizer))
                stale = True
        if stale or (self.watched and not self._flat):
            self.reread()

    def forget(self) -> None:
        """Let go of every tensor."""
        self._flat, self._keys, self._index = [], [], {}

    def reread(self) -> None:
        """Read the parameters of all optimizers again."""
        self.forget()
        for watched in self.watched.values():
            optimizer = watched.ref()
            for p in () if optimizer is None else params_of(optimizer):
                key = self.numbers.of(p)
                if key not in self._index:
                    self._index[key] = len(self._flat)
                    self._flat.append(p)
                    self._keys.append(key)

    def look(self) -> dict[int, Mark]:
        """Return what can be told of each gradient without reading it."""
        marks: dict[int, Mark] = {}
        for key, p in zip(self._keys, self._flat, strict=True):
            grad = p.grad
            marks[key] = None if grad is None else (id(grad), _version_of(grad))
        return marks

    def of_grad(self, tensor: Tensor) -> int | None:
        """Return the number of the parameter whose gradient this is, detached or not."""
        if self._by_grad is None or self._by_grad[0] is not self.marks:
            found = {mark[0]: key for key, mark in self.marks.items() if mark is not None}
            self._by_grad, self._by_memory = (self.marks, found), None
        key = self._by_grad[1].get(id(tensor))
        if key is not None or not _is_plain(tensor) or tensor.grad_fn is not None:
            return key
        # `p.grad.detach()` and `p.grad.data` are other objects on the same memory.
        if self._by_memory is None:
            pairs = [(key, self.param(key).grad) for key in self._by_grad[1].values()]
            self._by_memory = {_memory(g): key for key, g in pairs if _is_plain(g)}
        return self._by_memory.get(_memory(tensor))

    def grads(self, keys: Iterable[int]) -> list[Tensor]:
        """Return the gradients of these parameters, where there are any."""
        found = (self._flat[self._index[key]].grad for key in keys if key in self._index)
        return [grad for grad in found if grad is not None]

    def param(self, key: int) -> Tensor:
        """Return a parameter by its number."""
        return self._flat[self._index[key]]

    def choose_probes(self, touched: frozenset[int]) -> None:
        """Choose which gradients are sampled, once an optimizer has some."""
        for watched in self.watched.values():
            if watched.probes or not (mine := sorted(watched.keys & touched)):
                continue
            places = {0, len(mine) // 2, len(mine) - 1}
            chosen = [mine[place] for place in sorted(places)][:NUM_PROBES]
            watched.probes = tuple(key for key in chosen if self.sample(key) is not None)

    def sample(self, key: int) -> list[float] | None:
        """Return some values of a gradient; None where there is none, or it is not plain."""
        place = self._index.get(key)
        grad = None if place is None else self._flat[place].grad
        return None if grad is None else sample_of(grad)

    def take_samples(self, keys: frozenset[int] | None = None) -> None:
        """Remember the sampled values as they are now.

        Args:
            keys: Only of these; None for all.
        """
        for watched in self.watched.values():
            for key in watched.probes:
                if keys is None or key in keys:
                    values = self.sample(key)
                    if values is None:
                        self.samples.pop(key, None)
                    else:
                        self.samples[key] = values


def _version_of(grad: Tensor) -> int:
    # One made in inference mode has no version, and refuses to be asked.
    return -1 if grad.is_inference() else int(grad._version)  # noqa: SLF001


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return every parameter of an optimizer, as listed."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def shape_of(optimizer: Optimizer) -> tuple[tuple[int, int], ...]:
    """Return what changes when the groups of an optimizer do."""
    return tuple((id(group["params"]), len(group["params"])) for group in optimizer.param_groups)


def sample_of(tensor: Tensor) -> list[float] | None:
    """Return up to 16 values spread over a dense tensor; None for any other."""
    if hasattr(tensor, "to_local") or tensor.layout != torch.strided or tensor.numel() == 0:
        return None
    if not tensor.is_contiguous():
        tensor = tensor.detach().flatten() if tensor.numel() < 1_000_000 else tensor[:1].flatten()
    flat = tensor.detach().view(-1)
    stride = max(1, flat.numel() // SAMPLE)
    values: list[float] = flat[::stride][:SAMPLE].tolist()
    return values


def ratio_of(before: list[float], after: list[float], tolerance: float) -> float:
    """Return by what one number `after` is `before` multiplied; nan if by none.

    Args:
        before: Values.
        after: As many.
        tolerance: Relative error that rounding explains.
    """
    if len(before) != len(after) or not all(map(math.isfinite, [*before, *after])):
        return math.nan
    square = sum(x * x for x in before)
    if not square:
        return math.nan
    ratio = sum(x * y for x, y in zip(before, after, strict=True)) / square
    rest = sum((y - ratio * x) ** 2 for x, y in zip(before, after, strict=True))
    size = sum(y * y for y in after)
    if not size:
        return 0.0
    return ratio if rest <= (tolerance**2) * size else math.nan


def _is_plain(tensor: Any) -> TypeGuard[Tensor]:
    return type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_meta


def _memory(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape
