"""Sharing data out: all ranks read one order, and each runs its turns of every window.

    rank r of n runs the microbatches at positions r, r + n, r + 2n, ... of each window

Windows are cut as one process would cut them, so a run is the same run on any number of ranks, and
so is its place in the data. No microbatch is run twice or left out; a window that does not divide
gives some ranks one more.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import random
import zlib
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Final, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..cutting import ByTargets, Count, Cut, Cutting, cut_of
from ..snapshot import RandomState, generators
from ..stream import Stream

__all__ = ["Share", "Shared", "Turns", "require_turns", "shared"]

Batch = TypeVar("Batch")


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """Which part of the data one rank runs.

    Attributes:
        rank: This rank, of those that see different data.
        num_ranks: How many of those there are.
        period: After how many batches turns begin anew, which is where a window ends; None where
            only a look at the batches tells.

    Example:
        >>> [Share(rank=1, num_ranks=2, period=3).is_own(index) for index in range(6)]
        [False, True, False, False, True, False]
    """

    rank: int = 0
    num_ranks: int = 1
    period: int | None = None

    def is_own(self, index: int) -> bool:
        """Whether this rank runs the batch at this position of a pass."""
        return self.period is None or index % self.period % self.num_ranks == self.rank


class _Elsewhere:
    """Stands for a batch that another rank reads."""


ELSEWHERE: Final = _Elsewhere()


@dataclasses.dataclass(frozen=True, slots=True)
class Turns:
    """Cuts windows as one process does, and takes this rank's turns of each.

    Attributes:
        way: How one process cuts.
        share: Which turns are this rank's.
    """

    way: Cutting
    share: Share

    def cuts(
        self, stream: Stream[Batch], count: Count | None, *, read_ahead: bool
    ) -> Iterator[Cut[Batch]]:
        """Cut a pass. Reads a window ahead; counts only this rank's part where that will do."""
        cuts_by_count = isinstance(self.way, ByTargets)
        own = slice(self.share.rank, None, self.share.num_ranks)
        for cut in self.way.cuts(stream, count if cuts_by_count else None, read_ahead=True):
            batches = [batch for batch, _ in cut.pull][own]
            if cut.counts is None:
                yield cut_of(batches, count)
            else:
                yield dataclasses.replace(cut_of(batches, None), counts=cut.counts[own])


class Shared:
    """A loader that gives every position of its order on every rank; some only as a stand-in.

    A plain `DataLoader` over a dataset with indices reads and collates none of the batches that
    are another rank's. Any other loader is read whole by every rank.

    What decides the order must be the same on all ranks. Where it is drawn from the global random
    streams, of which each rank has its own, it is drawn from one that all have alike instead.

    Args:
        loader: Gives the batches of one epoch.
        share: Which of them this rank runs.
        seed: Of the stream that all ranks have alike.

    Attributes:
        loader: The one that was given.
        generator: Begins that stream anew in each pass; None where the loader has generators of its
            own and there is one rank, so that nothing is done to it.
        mark: Of all indices read so far; equal where ranks read one order.
    """

    def __init__(self, loader: Iterable[Any], share: Share, *, seed: int) -> None:
        self.loader = loader
        self.mark = 0
        self._share = share
        needs_stream = share.num_ranks > 1 or not list(generators(loader))
        self.generator = torch.Generator().manual_seed(seed) if needs_stream else None
        self._stream: RandomState | None = None
        self._is_drawing = False
        self._order: _Order | None = None
        self._own_loader = self._reading_own(loader)

    def __iter__(self) -> Iterator[Any]:
        self._begin_stream()
        if self._own_loader is not None:
            yield from self._read_own(self._own_loader)
            return
        with self._drawing():
            batches = iter(self.loader)
        while True:
            with self._drawing():
                batch = next(batches, ELSEWHERE)
            if batch is ELSEWHERE:
                return
            yield batch

    def _read_own(self, loader: DataLoader[Any]) -> Iterator[Any]:
        assert isinstance(self.loader, DataLoader)
        self._order = order = _Order(self._draws(self.loader.batch_sampler or ()))
        with self._drawing():
            batches = iter(loader)  # draws a seed for its workers
        while (position := order.next()) is not None:
            is_own, self.mark = position
            yield next(batches) if is_own else ELSEWHERE

    def __len__(self) -> int:
        if isinstance(self.loader, Sized):
            return len(self.loader)
        raise TypeError(f"`{type(self.loader).__name__}` has no length")

    def _reading_own(self, loader: Iterable[Any]) -> DataLoader[Any] | None:
        """Make a loader that reads this rank's batches only, where that can be done."""
        if self._share.period is None or self._share.num_ranks == 1:
            return None
        # A subclass may do anything with its batches.
        if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
            return None
        if loader.batch_sampler is None:
            return None
        return DataLoader(
            loader.dataset,
            batch_sampler=_OwnBatches(self),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def _draws(self, batch_sampler: Iterable[Any]) -> Iterator[tuple[Any, bool, int]]:
        """Draw the indices of each batch of a pass, with whose it is and a mark of all so far."""
        mark = self.mark
        with self._drawing():
            drawn = iter(batch_sampler)
        for position in itertools.count():
            with self._drawing():
                indices = next(drawn, None)
            if indices is None:
                return
            mark = zlib.crc32(repr(indices).encode(), mark)
            yield indices, self._share.is_own(position), mark

    def own_indices(self) -> Iterator[Any]:
        """Give the indices of this rank's batches of the pass that has begun."""
        assert self._order is not None
        return self._order.own()

    def _begin_stream(self) -> None:
        if self.generator is None:
            return
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())
        own = RandomState.capture_host()
        _seed_host(seed)
        self._stream = RandomState.capture_host()
        own.restore()

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """Have what is drawn in here come from the stream that all ranks have alike."""
        if self._stream is None or self._is_drawing:
            yield
            return
        self._is_drawing = True
        own = RandomState.capture_host()
        self._stream.restore()
        try:
            yield
        finally:
            self._stream = RandomState.capture_host()
            own.restore()
            self._is_drawing = False


class _SharedWithPlace(Shared):
    """One whose loader keeps its own place, which every rank has alike."""

    def state_dict(self) -> dict[str, Any]:
        """Give the loader's."""
        state: dict[str, Any] = self.loader.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have the loader go on from it."""
        self.loader.load_state_dict(state_dict)  # type: ignore[attr-defined]


class _Order:
    """The batches of one pass: drawn when somebody needs to know, and never sooner.

    Args:
        draws: Indices, whether they are this rank's, and a mark, of one batch after the other.
    """

    def __init__(self, draws: Iterator[tuple[Any, bool, int]]) -> None:
        self._draws = draws
        self._positions: collections.deque[tuple[bool, int]] = collections.deque()
        self._own: collections.deque[Any] = collections.deque()

    def next(self) -> tuple[bool, int] | None:
        """Say of the next position whether it is this rank's; None at the end."""
        if not self._positions and not self._draw():
            return None
        return self._positions.popleft()

    def own(self) -> Iterator[Any]:
        """Give this rank's indices; a loader with workers asks for them ahead of `next`."""
        while self._own or self._draw():
            if self._own:
                yield self._own.popleft()

    def _draw(self) -> bool:
        found = next(self._draws, None)
        if found is None:
            return False
        indices, is_own, mark = found
        self._positions.append((is_own, mark))
        if is_own:
            self._own.append(indices)
        return True


class _OwnBatches:
    """The batch sampler of a loader that reads one rank's batches."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def __iter__(self) -> Iterator[Any]:
        return self._shared.own_indices()


def require_turns(size: int | None, num_ranks: int) -> None:
    """Refuse windows of fewer batches than there are ranks.

    Args:
        size: Batches a window; None where they are not counted.
        num_ranks: How many take turns.

    Raises:
        ValueError: Some would never have any.
    """
    if size is not None and size < num_ranks:
        raise ValueError(
            f"`--size {size}` on {num_ranks} ranks: a window is shared out batch by batch, so "
            f"{num_ranks - size} of them would never have any. Raise `--size`, make the batches "
            "smaller, or start fewer ranks."
        )


def shared(loader: Iterable[Any], share: Share, *, seed: int) -> Shared:
    """Have all ranks read one order.

    Args:
        loader: Gives the batches of one epoch.
        share: Which of them this rank runs.
        seed: Of a random stream that all ranks have alike.

    Example:
        >>> rows = DataLoader(list(range(5)), batch_size=2)
        >>> [type(batch).__name__ for batch in shared(rows, Share(1, 2, period=2), seed=0)]
        ['_Elsewhere', 'Tensor', '_Elsewhere']
    """
    kind = _SharedWithPlace if hasattr(loader, "state_dict") else Shared
    return kind(loader, share, seed=seed)


def _seed_host(seed: int) -> None:
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global stream is what loaders draw from
    torch.default_generator.manual_seed(seed)  # not the devices' own
