"""Runs: some calls of blocks in a row, found while they are made, and made again in backward.

torch's own non-reentrant recompute does the keeping and the running again; it only asks for a
function that does once more what was done between its start and its end. Here that function calls
the blocks of the run one after the other, each with the arguments it had, those that the block
before made being made again.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["Run", "version_of"]


class Owner(Protocol):
    """Whoever is told of what happens to blocks."""

    def before_block(self, block: nn.Module) -> None:
        """See a block before its forward."""
        ...

    def replaying(self) -> AbstractContextManager[None]:
        """Enter before blocks are called again."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """Stands for a tensor that the call before made, which is not kept."""

    index: int


@dataclasses.dataclass(slots=True)
class _Kept:
    """A tensor that is an argument and was made by no call of the run."""

    tensor: Tensor
    version: int

    def value(self, block: nn.Module) -> Tensor:
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                f"An argument of `{type(block).__name__}` was changed in place after its forward, "
                "so running it again would give other gradients. Change a copy, or leave this "
                "block out of `recompute(blocks=...)`."
            )
        return self.tensor


@dataclasses.dataclass(slots=True)
class _Call:
    """One call of a block: what it was given, so that it can be called again."""

    block: nn.Module
    leaves: list[Any]
    spec: Any

    @classmethod
    def of(cls, block: nn.Module, args: Any, kwargs: Any, made: Sequence[Any]) -> _Call:
        leaves, spec = tree_flatten((args, kwargs))
        where = {id(t): index for index, ref in enumerate(made) if (t := ref()) is not None}
        kept: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                kept.append(leaf)
            elif id(leaf) in where:
                kept.append(_Made(where[id(leaf)]))
            else:
                # Detached, or the graph that saves this run would be held by what it saves.
                alias = leaf.detach().requires_grad_(leaf.requires_grad)
                kept.append(_Kept(alias, version_of(alias)))
        return cls(block, kept, spec)

    def again(self, made: Sequence[Any]) -> Any:
        values = []
        for leaf in self.leaves:
            if isinstance(leaf, _Made):
                values.append(made[leaf.index])
            else:
                values.append(leaf.value(self.block) if isinstance(leaf, _Kept) else leaf)
        args, kwargs = tree_unflatten(values, self.spec)
        return self.block(*args, **kwargs)


class Run:
    """Up to k calls in a row that are run again together."""

    def __init__(self, owner: Owner, block: nn.Module, args: Any, kwargs: Any) -> None:
        self.num_calls = 1
        self._owner = owner
        self._calls: list[_Call] = []
        self._made: list[Any] = []
        self._pause: AbstractContextManager[Any] | None = None
        owner.before_block(block)
        self._generator: Generator[None, None, None] = _begin(self._again, block, args, kwargs)
        next(self._generator)

    def _again(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        with self._owner.replaying():
            made = block(*args, **kwargs)
            for call in self._calls:
                made = call.again(tree_leaves(made))

    def resume(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        """Take another call into the run."""
        self._calls.append(_Call.of(block, args, kwargs, self._made))
        self.num_calls += 1
        self._owner.before_block(block)
        if self._pause is not None:
            self._pause.__exit__(None, None, None)
            self._pause = None

    def suspend(self, output: Any) -> None:
        """Let what the model does between two blocks be saved as ever."""
        self._made = [
            weakref.ref(leaf) if isinstance(leaf, Tensor) else (lambda: None)
            for leaf in tree_leaves(output)
        ]
        self._pause = saved_tensors_hooks(_same, _same)
        self._pause.__enter__()

    def end(self) -> None:
        """Complete the run: what it holds is what its backward begins with."""
        if self._pause is not None:
            self._pause.__exit__(None, None, None)
            self._pause = None
        next(self._generator, None)
        self._made = []

    def abort(self) -> None:
        """Leave the run as if it had never begun."""
        if self._pause is not None:
            self._pause.__exit__(None, None, None)
            self._pause = None
        self._generator.close()


def _begin(again: Any, block: nn.Module, args: Any, kwargs: Any) -> Generator[None, None, None]:
    """Start torch's own non-reentrant recompute over whatever is called until it is ended."""
    leaves, spec = tree_flatten((args, kwargs))

    def function(*leaves: Any) -> None:
        args, kwargs = tree_unflatten(list(leaves), spec)
        again(block, args, kwargs)

    generator: Generator[None, None, None] = (
        torch_checkpoint._checkpoint_without_reentrant_generator(  # noqa: SLF001 - as its own composable form does
            function, True, torch_checkpoint.noop_context_fn, "default", False, True, *leaves
        )
    )
    return generator


def _same(value: Any) -> Any:
    return value


def version_of(tensor: Tensor) -> int:
    """Give how often a tensor was changed in place.

    Args:
        tensor: Or another of the same storage.
    """
    return tensor._version  # noqa: SLF001 - private by name only; autograd itself relies on it
