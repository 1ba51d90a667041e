"""Data shared out: one order on all ranks, each batch run once, whatever the loader is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from midstep.cutting import BySize
from midstep.recipes.share import Share, Shared, Turns, require_turns, shared
from midstep.snapshot import generators
from midstep.stream import Stream

NUM_RANKS = 3
SIZE = 4
ROWS = torch.arange(27)


class Endless(IterableDataset[int]):
    """Draws its order as it goes, from Python's own stream."""

    def __iter__(self) -> Iterator[int]:
        yield from random.sample(range(27), 27)


class Mine(DataLoader[Any]):
    """May do anything."""


def order() -> torch.Generator:
    return torch.Generator().manual_seed(7)


LOADERS: dict[str, Any] = {
    "in order": lambda: DataLoader(ROWS, batch_size=2),
    "a generator of its own": lambda: DataLoader(ROWS, 2, shuffle=True, generator=order()),
    "the global stream": lambda: DataLoader(ROWS, 2, shuffle=True),
    "workers": lambda: DataLoader(ROWS, 2, shuffle=True, num_workers=1),
    "a subclass": lambda: Mine(ROWS, 2, shuffle=True),
    "iterable": lambda: DataLoader(Endless(), batch_size=2),
    "a list": lambda: list(ROWS.split(2)),
}


def own_windows(data: Shared, share: Share) -> list[list[list[int]]]:
    cuts = Turns(BySize(SIZE), share).cuts(Stream(iter(data)), None, read_ahead=True)
    return [[batch.tolist() for batch, _ in cut.pull] for cut in cuts]


@pytest.mark.parametrize("name", LOADERS)
def test_ranks_together_run_the_windows_of_one_order(name: str) -> None:
    shares = [Share(rank, NUM_RANKS, SIZE) for rank in range(NUM_RANKS)]
    everyone = []
    for share in shares:
        torch.manual_seed(share.rank)  # each has streams of its own
        random.seed(share.rank)
        data = shared(LOADERS[name](), share, seed=5)
        before = torch.get_rng_state()
        everyone.append([own_windows(data, share) for _ in range(2)])
        assert torch.equal(before, torch.get_rng_state())
    for passes in zip(*everyone, strict=True):
        windows = list(zip(*passes, strict=True))
        assert [len(window[0]) for window in windows] == [2, 2, 2, 1]  # 14 batches, 4 a window
        rows = [row for window in windows for part in window for batch in part for row in batch]
        assert sorted(rows) == ROWS.tolist()
    first, second = everyone[0]
    assert (first == second) == (name in {"in order", "a list"})


def test_one_rank_reads_what_the_loader_gives_untouched() -> None:
    loader = LOADERS["a generator of its own"]()
    data = shared(loader, Share(), seed=5)
    assert data.generator is None
    found = [batch.tolist() for batch in data]
    assert found == [batch.tolist() for batch in LOADERS["a generator of its own"]()]


def test_what_decides_the_order_is_seen_by_whoever_must_put_it_back() -> None:
    loader = LOADERS["the global stream"]()
    data = shared(loader, Share(0, 2, SIZE), seed=5)
    before = [generator.get_state() for generator in generators(data)]
    first = [str(batch) for batch in data]
    for generator, state in zip(generators(data), before, strict=True):
        generator.set_state(state)
    assert [str(batch)[:9] for batch in data] == [text[:9] for text in first]
    assert len(before) == 1


class OwnPlace:
    """Keeps its own place."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 5:
            self.place += 1
            yield self.place
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.place = state_dict["place"]


def test_a_loader_that_keeps_its_place_still_does() -> None:
    data: Any = shared(OwnPlace(), Share(0, 2, 2), seed=0)
    data.load_state_dict({"place": 3})
    assert list(data) == [4, 5]
    assert data.state_dict() == {"place": 0}
    assert not hasattr(shared([1], Share(), seed=0), "state_dict")


def test_equal_marks_are_equal_orders() -> None:
    def mark(seed: int, rank: int) -> int:
        loader = DataLoader(ROWS, 2, shuffle=True, generator=torch.Generator().manual_seed(seed))
        data = shared(loader, Share(rank, 2, SIZE), seed=0)
        list(data)
        return data.mark

    assert mark(1, 0) == mark(1, 1) != mark(2, 1)


def test_a_window_must_have_a_batch_for_every_rank() -> None:
    require_turns(4, 4)
    require_turns(None, 4)
    with pytest.raises(ValueError, match=r"`--size 3` on 4 ranks: .* 1 of them"):
        require_turns(3, 4)
