"""Live bytes: which storages exist while operations run, real or fake.

A fake tensor has a storage with a size and no memory, and goes away like a real one, so the same
count gives the peak of a step that is never computed. What a kernel takes inside itself shows only
for those that `opaque` knows; `peaks.peak_of` sees it for all that are really run.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .opaque import inside

__all__ = ["LiveBytes", "saved_bytes"]


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of every storage that operations make, until it goes away.

    Costs about 10 microseconds an operation.

    Args:
        known: What was there before and is not counted.

    Attributes:
        held: Bytes at present.
        most: The most there ever were, since `restart`.

    Example:
        >>> x = torch.zeros(1000)
        >>> with LiveBytes([x]) as live:
        ...     y = (x + 1).exp().sum()
        >>> live.held, live.most
        (4, 8000)
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = 0
        self.most = 0
        self._alive: dict[int, weakref.finalize[Any, Any]] = {}
        self._held_by: list[weakref.finalize[Any, Any]] = []
        for tensor in known:
            self._note(tensor, 0)

    def restart(self) -> None:
        """Begin a new peak with what is held now."""
        self.most = self.held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        within = inside(func, args, kwargs or {})
        sizes: Sequence[int | None] = () if within is None else within.outputs
        for leaf, size in itertools.zip_longest(tree_leaves(out), sizes):
            if isinstance(leaf, Tensor):
                self._note(leaf, size)
        if within is not None:
            self.most = max(self.most, self.held + within.transient)
        return out

    def _note(self, tensor: Tensor, size: int | None = None) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - the identity of a storage
        if key in self._alive:
            return
        num_bytes = storage.nbytes() if size is None else size
        self._alive[key] = weakref.finalize(storage, self._forget, key, num_bytes)
        self._add(num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        del self._alive[key]
        self.held -= num_bytes

    def hold(self, owner: object, num_bytes: int) -> None:
        """Count bytes that no operation makes, until their owner goes away.

        Args:
            owner: Whose they are.
            num_bytes: How many.
        """
        self._add(num_bytes)
        self._held_by.append(weakref.finalize(owner, self._add, -num_bytes))

    @contextlib.contextmanager
    def aside(self, num_bytes: int) -> Iterator[None]:
        """Count bytes that no operation makes while this is open.

        Args:
            num_bytes: How many.
        """
        self._add(num_bytes)
        try:
            yield
        finally:
            self._add(-num_bytes)

    def _add(self, num_bytes: int) -> None:
        self.held += num_bytes
        self.most = max(self.most, self.held)

    def close(self) -> None:
        """Stop waiting for what is still there."""
        for finalizer in [*self._alive.values(), *self._held_by]:
            finalizer.detach()
        self._alive.clear()
        self._held_by.clear()


class saved_bytes(torch.autograd.graph.saved_tensors_hooks):  # noqa: N801 - a context, like torch's
    """Adds up what autograd saves for backward within it, each storage once.

    Args:
        known: What is there anyway, such as parameters and the batch, and is not counted.

    Attributes:
        total: The bytes so far.

    Example:
        >>> x, weight = torch.ones(10, 4), torch.ones(4, 4, requires_grad=True)
        >>> with saved_bytes([x, weight]) as saved:
        ...     y = (x @ weight).exp()
        >>> saved.total
        160
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__(self._pack, _same)
        self.total = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}  # noqa: SLF001

    def __enter__(self) -> Self:  # type: ignore[override]
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:  # noqa: SLF001 - the identity of a storage
            self._seen.add(storage._cdata)  # noqa: SLF001
            self.total += storage.nbytes()
        return tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor
