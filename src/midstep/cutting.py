"""Cutting: how a stream of batches becomes the microbatches of one window after another.

Three ways, one class each: a number of batches, pieces of each batch, or a number of targets. A cut
says which batches belong together and what each counts; the sums are the window's own affair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from .autorows import AutoRows
from .batches import cut_rows, num_rows
from .errors import WindowError
from .stream import Stream
from .terms import terms_of

__all__ = [
    "ByAutoRows",
    "ByRows",
    "BySize",
    "ByTargets",
    "Count",
    "Cut",
    "Cutting",
    "Elastic",
    "cut_of",
    "cutting_of",
]

Batch = TypeVar("Batch")
Count = Callable[[Any], float | Mapping[str, float]]


@dataclasses.dataclass(frozen=True, slots=True)
class Elastic(Generic[Batch]):
    """A batch that may be cut into microbatches of any size, time and again.

    Attributes:
        batch: All of it; None on a rank that has none, while others do.
        count: What each microbatch counts; None when the counts come with the losses.
        auto: How its size is found.
    """

    batch: Batch | None
    count: Count | None
    auto: AutoRows

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return 0 if self.batch is None else num_rows(self.batch)

    def cut(self, rows: int) -> Cut[Batch]:
        """Cut it into microbatches of at most so many rows."""
        if self.batch is None:
            return Cut(iter(()), None if self.count is None else [], size=0, num_known=0)
        return cut_of(cut_rows(self.batch, rows), self.count)


@dataclasses.dataclass(slots=True)
class Cut(Generic[Batch]):
    """The microbatches of one window.

    Attributes:
        pull: Gives each microbatch with whether it is the window's last.
        counts: What each microbatch counts, by term; None when the counts come with the losses.
        size: How many microbatches there are, or at most will be.
        num_known: How many there are, when they have been read ahead.
        elastic: How it may be cut again; None where it is cut for good.
    """

    pull: Iterator[tuple[Batch, bool]]
    counts: list[dict[str, float]] | None
    size: int
    num_known: int | None = None
    elastic: Elastic[Batch] | None = None


def cut_of(microbatches: Sequence[Batch], count: Count | None) -> Cut[Batch]:
    """Make a cut of microbatches that are all at hand; counts them when `count` is given."""
    counts = None if count is None else [terms_of(count(batch)) for batch in microbatches]
    return _read_ahead(microbatches, counts)


def _read_ahead(microbatches: Sequence[Batch], counts: list[dict[str, float]] | None) -> Cut[Batch]:
    last = len(microbatches) - 1
    pull = ((batch, index == last) for index, batch in enumerate(microbatches))
    return Cut(pull, counts, len(microbatches), len(microbatches))


@dataclasses.dataclass(frozen=True, slots=True)
class BySize:
    """So many batches a window; the last window may be short."""

    size: int
    drop_tail: bool = False

    def __post_init__(self) -> None:
        _require_whole("size", self.size, "batch")

    def cuts(
        self, stream: Stream[Batch], count: Count | None, *, read_ahead: bool
    ) -> Iterator[Cut[Batch]]:
        """Cut a pass. Reads one batch ahead; a whole window when counted or tails are dropped."""
        while stream.has_next():
            if count is None and not self.drop_tail and not read_ahead:
                yield Cut(self._as_read(stream), None, self.size)
                continue
            batches = _take(stream, self.size)
            if len(batches) == self.size or not self.drop_tail:
                yield cut_of(batches, count)

    def _as_read(self, stream: Stream[Batch]) -> Iterator[tuple[Batch, bool]]:
        for position in range(1, self.size + 1):
            batch = next(stream)
            is_last = position == self.size or not stream.has_next()
            yield batch, is_last
            if is_last:
                return


@dataclasses.dataclass(frozen=True, slots=True)
class ByRows:
    """Each batch is one window, cut into microbatches of at most so many rows."""

    rows: int

    def __post_init__(self) -> None:
        _require_whole("rows", self.rows, "row")

    def cuts(
        self, stream: Stream[Batch], count: Count | None, *, read_ahead: bool
    ) -> Iterator[Cut[Batch]]:
        """Cut a pass. Reads nothing ahead and copies no row."""
        for batch in stream:
            yield cut_of(cut_rows(batch, self.rows), count)


@dataclasses.dataclass(frozen=True, slots=True)
class ByAutoRows:
    """Each batch is one window, cut into microbatches as large as fit."""

    auto: AutoRows

    def cuts(
        self, stream: Stream[Batch], count: Count | None, *, read_ahead: bool
    ) -> Iterator[Cut[Batch]]:
        """Cut a pass. Reads nothing ahead; how a batch is cut is found when it is run."""
        for batch in stream:
            whole = cut_of([batch], count)
            yield dataclasses.replace(
                whole, pull=_OnlyByUpdate(), elastic=Elastic(batch, count, self.auto)
            )


class _OnlyByUpdate(Iterator[tuple[Any, bool]]):
    """Stands for the microbatches of a batch that is not cut yet."""

    def __next__(self) -> tuple[Any, bool]:
        raise WindowError(
            "`windows(rows=ms.AutoRows())` and a loop over the microbatches: when memory runs out, "
            "the window must be run again, which only `updater.update(window, loss)` can. Hand the "
            "window over, or give `rows` as a number."
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ByTargets:
    """As many batches a window as hold at least so many targets; the last window may hold fewer."""

    targets: int
    drop_tail: bool = False

    def __post_init__(self) -> None:
        _require_whole("targets", self.targets, "target")

    def cuts(
        self, stream: Stream[Batch], count: Count | None, *, read_ahead: bool
    ) -> Iterator[Cut[Batch]]:
        """Cut a pass. Reads a window ahead."""
        assert count is not None  # `cutting_of` refuses it
        while stream.has_next():
            batches: list[Batch] = []
            counts: list[dict[str, float]] = []
            found = 0.0
            while found < self.targets and stream.has_next():
                batches.append(next(stream))
                counts.append(terms_of(count(batches[-1])))
                found += next(iter(counts[-1].values()), 0.0)  # the first term is the leading one
            if found >= self.targets or not self.drop_tail:
                yield _read_ahead(batches, counts)


def cutting_of(
    *,
    size: int | None,
    rows: int | AutoRows | None,
    targets: int | None,
    drop_tail: bool,
    count: Count | None,
) -> Cutting:
    """Find the one way to cut that was asked for.

    Raises:
        ValueError: Not exactly one of the three, a number below 1, or a combination that could not
            be honoured.
        TypeError: `count` is no function.
    """
    if count is not None and not callable(count):
        raise TypeError(
            f"`windows(count={count!r})`: must be a function of a microbatch, because each has its "
            "own number of targets. Pass `ms.targets()`, `ms.rows()`, `ms.elements()` or your own."
        )
    if sum(way is not None for way in (size, rows, targets)) != 1:
        raise ValueError(
            f"`windows(size={size}, rows={rows}, targets={targets})`: pass exactly one of the "
            "three, because each says in its own way which microbatches make one update."
        )
    if size is not None:
        return BySize(size, drop_tail)
    if rows is not None:
        if drop_tail:
            raise ValueError(
                "`windows(rows=..., drop_tail=True)`: every batch is a whole window here, so there "
                "is no tail to drop. Leave it out."
            )
        return ByAutoRows(rows) if isinstance(rows, AutoRows) else ByRows(rows)
    assert targets is not None
    if count is None:
        raise ValueError(
            f"`windows(targets={targets})` without `count=`: how many batches make a window must "
            "be known before its first forward. Pass `count=`, for example "
            '`ms.targets(key="labels")`.'
        )
    return ByTargets(targets, drop_tail)


class Cutting(Protocol):
    """A way to cut a pass over the data into windows."""

    def cuts(
        self, stream: Stream[Batch], count: Count | None, *, read_ahead: bool
    ) -> Iterator[Cut[Batch]]:
        """Cut a pass."""
        ...


def _take(stream: Stream[Batch], size: int) -> list[Batch]:
    batches: list[Batch] = []
    while len(batches) < size and stream.has_next():
        batches.append(next(stream))
    return batches


def _require_whole(name: str, value: object, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"`windows({name}={value!r})`: must be a whole number of at least 1, because a window "
            f"without a {unit} has no gradient."
        )
