"""The handle: which calls of blocks make a run, and what is told about them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .runs import Run
from .state import ChangedBuffers, Versions, changed, versions_of

__all__ = ["Recompute"]


class CountsBytes(Protocol):
    """Whoever counts the bytes that no operation makes: the random state of each run."""

    def hold(self, owner: object, num_bytes: int) -> None:
        """Count them until their owner goes away."""
        ...

    def aside(self, num_bytes: int) -> AbstractContextManager[None]:
        """Count them while this is open."""
        ...


class Recompute:
    """Blocks that are run again in backward, until `remove` is called.

    Attributes:
        every: Calls of blocks that are run again together.
        names: Of the blocks, as the model names them.
        counts: Counts the random states that are kept; None for nobody.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], every: int) -> None:
        self.every = every
        self.names = list(blocks)
        self.counts: CountsBytes | None = None
        self._blocks = dict(blocks)
        self._is_replaying = False
        self._depth = 0
        self._run: Run | None = None
        self._versions: Versions = {}
        self._untold: list[str] = []  # buffers that are known to change and were not warned of
        self._changing: dict[str, set[str]] = {}  # by block, the buffers its forward changes
        self._name_of = {id(block): name for name, block in blocks.items()}
        self._lasts = _lasts(self.names, list(blocks.values()))
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._enter, prepend=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]
        for block in dict.fromkeys(blocks.values()):
            self._handles += [
                block.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
                block.register_forward_hook(self._after, always_call=True),
            ]

    def remove(self) -> None:
        """Leave the model as it was before."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Call blocks without making a run of it, and put back what their forward changes."""
        before, self._is_replaying = self._is_replaying, True
        buffers = ChangedBuffers(self._blocks, self._changing)
        counts = self.counts
        try:
            # The present random state lies aside while that of the first run is in its place.
            with contextlib.nullcontext() if counts is None else counts.aside(_state_bytes()):
                yield
        finally:
            self._is_replaying = before
            buffers.restore()

    def before_block(self, block: nn.Module) -> None:
        """Note the versions of its buffers, to see which of them its forward changes."""
        self._versions = versions_of(block)

    def _enter(self, model: nn.Module, args: Any) -> None:
        self._depth += not self._is_replaying

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._is_replaying:
            return
        self._depth -= 1
        if self._depth:
            return
        if self._run is not None:
            self._end(failed=output is None)
        self._tell()

    def _before(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_replaying or not torch.is_grad_enabled():
            return
        if self._run is None:
            self._run = Run(self, block, args, kwargs)
            if self.counts is not None:
                self.counts.hold(self._run, _state_bytes())
        else:
            self._run.resume(block, args, kwargs)

    def _after(self, block: nn.Module, args: Any, output: Any) -> None:
        if self._is_replaying or self._run is None:
            return
        if output is None:
            self._end(failed=True)
            return
        self._look(block)
        is_last = not self._depth or id(block) in self._lasts
        if self._run.num_calls >= self.every or is_last:
            self._end(failed=False)
        else:
            self._run.suspend(output)
        if not self._depth:
            self._tell()

    def _end(self, *, failed: bool) -> None:
        run, self._run = self._run, None
        assert run is not None
        if failed:
            run.abort()
        else:
            run.end()

    def _look(self, block: nn.Module) -> None:
        name = self._name_of[id(block)]
        known = self._changing.setdefault(name, set())
        new = changed(block, self._versions) - known
        known |= new
        self._untold += [f"`{name}.{key}`" for key in sorted(new)]

    def _tell(self) -> None:
        """Warn once of all that a forward of the model has shown."""
        names, self._untold = self._untold, []
        if not names:
            return
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        warnings.warn(
            f"The forward of the blocks changes {', '.join(names[:5])}{more}, and recompute runs "
            "it twice. They are put back after the second run, so each batch counts once. State "
            "kept outside buffers is not seen: leave blocks that have some out of "
            "`recompute(blocks=...)`.",
            UserWarning,
            stacklevel=2,
        )


def _state_bytes() -> int:
    return torch.get_rng_state().nbytes


def _lasts(names: Sequence[str], blocks: Sequence[nn.Module]) -> set[int]:
    """Find the last block of each list; a run does not go on into another list."""
    last = {name.rpartition(".")[0]: id(block) for name, block in zip(names, blocks, strict=True)}
    return set(last.values())
