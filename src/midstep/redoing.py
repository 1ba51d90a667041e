"""Redoing: a step that was broken off is gone through again, and what it had written is left out.

A step is a row of operations, some of which write to a weight or a moment. When it is known how
many writes each of them has had, the step can be run from its beginning: the first so many writes
to each are skipped, the later ones made. What is only computed is computed anew, and must not
depend on what lies further on than it did the first time; where it does, that is found.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

__all__ = ["Redo", "Unsound", "Written", "key_of"]

Key = int
_PLAIN = frozenset({Tensor, nn.Parameter})


class Unsound(Exception):
    """The step cannot be gone through again: something read is not as it was the first time."""


def key_of(tensor: Tensor) -> Key:
    """Name the memory behind a tensor, the same for all views of it.

    Args:
        tensor: Kept alive by the caller, since memory that was let go may be had by another.
    """
    # Neither wrappers nor sparse tensors have a memory of their own.
    is_plain: bool = type(tensor) in _PLAIN or not is_traceable_wrapper_subclass(tensor)
    if is_plain and tensor.layout is torch.strided:
        return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the identity of a storage
    return id(tensor)


class Written(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the writes to memory, those of torch's grouped kernels included.

    Those kernels (`foreach`, `fused`) do not count up the versions of what they write. Costs a few
    microseconds an operation, and one a tensor it writes.

    Attributes:
        num: Writes so far, by memory; of memory that was let go the number means nothing.
        is_torn: Whether a kernel of several tensors failed that may have written some of them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num: dict[Key, int] = {}
        self.is_torn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = _written_by(func, args, kwargs or {})
        try:
            out = func(*args, **(kwargs or {}))
        except BaseException:
            self.is_torn = self.is_torn or _may_be_torn(written, args)
            raise
        for tensor in written:
            key = key_of(tensor)
            self.num[key] = self.num.get(key, 0) + 1
        return out


class Redo(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Goes through a step again and skips the writes that were made.

    Args:
        num_written: To each memory that was there before the step.

    Raises:
        Unsound: Within it, when a write depends on what is further on than it was.
    """

    def __init__(self, num_written: Mapping[Key, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._done = dict(num_written)
        self._seen = dict.fromkeys(num_written, 0)
        self._unclear: dict[Key, Tensor] = {}  # computed from what is further on
        self.is_torn = False

    def check(self, kept: Iterable[Tensor]) -> None:
        """Refuse what the step leaves behind, where that is not what one go would have left.

        Args:
            kept: All that outlives the step.

        Raises:
            Unsound: Some of it was computed from a later value, or the goes differed.
        """
        if any(self._is_ahead(key) for key in self._done):
            raise Unsound("the second go wrote less than the first")
        if any(key_of(t) in self._unclear for t in kept):
            raise Unsound("it would keep what depends on a later value")

    @property
    def num(self) -> dict[Key, int]:
        """Writes made so far, of both goes."""
        return {key: max(done, self._seen[key]) for key, done in self._done.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _written_by(func, args, kwargs)
        if any(self._is_ahead(key_of(t)) for t in written):
            return self._skipped(func, args, kwargs, written)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        is_clear = not any(self._is_ahead(k) or k in self._unclear for k in map(key_of, given))
        known = [t for t in written if key_of(t) in self._done]
        if known and not is_clear:
            raise Unsound(f"`{func}` would write what depends on a later value")
        try:
            out = func(*args, **kwargs)
        except BaseException:
            self.is_torn = self.is_torn or _may_be_torn(written, args)
            raise
        for tensor in known:
            self._seen[key_of(tensor)] += 1
        if not is_clear:
            self._note_unclear(func, out, written)
        return out

    def _is_ahead(self, key: Key) -> bool:
        return self._seen.get(key, 0) < self._done.get(key, 0)

    def _skipped(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Unsound(f"`{func}` has drawn random numbers that would be missing")
        for tensor in written:
            key = key_of(tensor)
            if not self._is_ahead(key):
                raise Unsound(f"`{func}` has written a part of its tensors")
            self._seen[key] += 1
        return _returned(func, args, kwargs)

    def _note_unclear(self, func: Any, out: Any, written: list[Tensor]) -> None:
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if not made and not written:
            raise Unsound(f"`{func}` reads a number that depends on a later value")
        for tensor in [*made, *written]:
            key = key_of(tensor)
            if key not in self._done:  # a view of a weight is as the weight is
                self._unclear[key] = tensor


@functools.cache
def _places(func: Any) -> tuple[tuple[int, str], ...]:
    """Find which arguments of an operation it writes to."""
    schema = getattr(func, "_schema", None)
    arguments = [] if schema is None else schema.arguments
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written_by(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    found = [
        args[position] if position < len(args) else kwargs.get(name)
        for position, name in _places(func)
    ]
    tensors: list[Tensor] = []
    for value in found:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif value is not None:
            tensors += [tensor for tensor in value if tensor is not None]
    return tensors


def _may_be_torn(written: list[Tensor], args: Any) -> bool:
    """Whether a kernel that failed may have written some of its tensors.

    Of one tensor none has: memory is asked for before the first write. Of several, a kernel that
    takes them one by one asks for memory in between only where it has to convert.
    """
    if len(written) < 2:
        return False
    given = [t for t in tree_leaves(args) if isinstance(t, Tensor) and t.ndim]
    return len({(t.dtype, t.device) for t in given}) > 1


def _returned(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Give what an operation that writes would have returned: what it writes to."""
    arguments, found = func._schema.arguments, []  # noqa: SLF001 - torch has no other way
    for value in func._schema.returns:  # noqa: SLF001
        names = set() if value.alias_info is None else value.alias_info.before_set
        place = next(
            (
                (i, a.name)
                for i, a in enumerate(arguments)
                if a.alias_info is not None and a.alias_info.before_set & names
            ),
            None,
        )
        if place is None:
            raise Unsound(f"`{func}` returns something else beside what it writes")
        found.append(args[place[0]] if place[0] < len(args) else kwargs[place[1]])
    if not found:
        return None
    return found[0] if len(found) == 1 else tuple(found)
