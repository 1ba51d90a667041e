"""Cutting a pass into windows: which batches belong together, and how far the stream is read."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import midstep as ms
from midstep.cutting import cut_of, cutting_of
from midstep.stream import Stream


def cuts_of(
    batches: list[Any], *, count: Any = None, read_ahead: bool = False, **ways: Any
) -> list[list[tuple[Any, bool]]]:
    """Each window's microbatches, pulled to the end, with whether each was called the last."""
    settings = {"size": None, "rows": None, "targets": None, "drop_tail": False} | ways
    way = cutting_of(**settings, count=count)
    stream = Stream(iter(batches))
    return [list(cut.pull) for cut in way.cuts(stream, count, read_ahead=read_ahead)]


@given(
    num=st.integers(0, 12),
    size=st.integers(1, 5),
    counted=st.booleans(),
    read_ahead=st.booleans(),
    drop_tail=st.booleans(),
)
def test_windows_by_size_are_the_batches_in_order_and_the_last_is_called_so(
    num: int, size: int, counted: bool, read_ahead: bool, drop_tail: bool
) -> None:
    windows = cuts_of(
        list(range(num)),
        size=size,
        count=(lambda _: 1) if counted else None,
        read_ahead=read_ahead,
        drop_tail=drop_tail,
    )
    whole = [list(range(start, min(start + size, num))) for start in range(0, num, size)]
    if drop_tail:
        whole = [group for group in whole if len(group) == size]
    assert [[batch for batch, _ in window] for window in windows] == whole
    for window in windows:
        assert [is_last for _, is_last in window] == [False] * (len(window) - 1) + [True]


@given(counts=st.lists(st.integers(0, 6), max_size=12), targets=st.integers(1, 10))
def test_windows_by_targets_end_as_soon_as_they_have_enough(
    counts: list[int], targets: int
) -> None:
    windows = cuts_of(counts, targets=targets, count=lambda batch: batch)
    groups = [[batch for batch, _ in window] for window in windows]
    assert [batch for group in groups for batch in group] == counts
    for group in groups[:-1]:
        assert sum(group) >= targets
    for group in groups:
        assert sum(group[:-1]) < targets


def test_the_first_term_decides_how_many_batches_make_a_window_by_targets() -> None:
    windows = cuts_of([1, 2, 3, 4], targets=3, count=lambda n: {"main": n, "aux": 100})
    assert [[batch for batch, _ in window] for window in windows] == [[1, 2], [3], [4]]


def test_windows_by_rows_take_each_batch_apart() -> None:
    windows = cuts_of([torch.arange(5), torch.arange(2)], rows=2)
    assert [[piece.tolist() for piece, _ in window] for window in windows] == [
        [[0, 1], [2, 3], [4]],
        [[0, 1]],
    ]


class Counting:
    """A pass that knows how far it was read."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.num_read = 0

    def __iter__(self) -> Iterator[int]:
        for index in range(self.num):
            self.num_read += 1
            yield index


def test_a_streamed_window_reads_one_batch_ahead_and_none_at_its_end() -> None:
    source = Counting(6)
    way = cutting_of(size=3, rows=None, targets=None, drop_tail=False, count=None)
    read = []
    for cut in way.cuts(Stream(iter(source)), None, read_ahead=False):
        for batch, _ in cut.pull:
            read.append((batch, source.num_read))
    assert read == [(0, 2), (1, 3), (2, 3), (3, 5), (4, 6), (5, 6)]


def test_a_counted_window_reads_itself_ahead_and_no_more() -> None:
    source = Counting(5)
    count = lambda _: 1  # noqa: E731
    way = cutting_of(size=3, rows=None, targets=None, drop_tail=False, count=count)
    read = []
    for cut in way.cuts(Stream(iter(source)), count, read_ahead=False):
        read.append(source.num_read)
        assert cut.counts == [{"loss": 1}] * cut.size
    assert read == [3, 5]


def test_a_count_is_asked_once_a_microbatch_and_before_any_is_handed_out() -> None:
    asked: list[int] = []

    def count(batch: int) -> int:
        asked.append(batch)
        return 1

    cut = cut_of([7, 8, 9], count)
    assert asked == [7, 8, 9]
    assert [batch for batch, _ in cut.pull] == [7, 8, 9]
    assert asked == [7, 8, 9]


def test_an_error_of_the_loader_comes_through_and_the_next_pass_is_whole() -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield torch.ones(1, 2)
        raise OSError("disk")

    model = torch.nn.Linear(2, 1)
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def train(count: Any) -> None:
        for window in updater.windows(broken(), size=3, count=count):
            updater.update(window, lambda m, x: ms.LossSum(m(x).sum(), len(x)))

    for count in (None, ms.rows()):
        with pytest.raises(OSError, match="disk"):
            train(count)
        assert all(p.grad is None for p in model.parameters())
    record = updater.update([torch.ones(1, 2)], lambda m, x: m(x).sum(), count=ms.rows())
    assert (record.update, record.num_microbatches) == (1, 1)


def test_a_pass_that_is_empty_has_no_window() -> None:
    model = torch.nn.Linear(2, 1)
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(updater.windows([], size=3)) == []
    assert updater.clock.epoch == 1


@given(st.lists(st.sampled_from(["next", "look"]), max_size=12), st.integers(0, 4))
def test_a_stream_gives_what_its_batches_are_whenever_it_looks_ahead(
    acts: list[str], num: int
) -> None:
    stream = Stream(iter(range(num)))
    given_out = 0
    for act in acts:
        if act == "look":
            assert stream.has_next() is (given_out < num)
            assert stream.is_ahead is (given_out < num)
        elif given_out < num:
            assert next(stream) == given_out
            given_out += 1
            assert stream.num_read == given_out
        else:
            assert next(stream, None) is None
