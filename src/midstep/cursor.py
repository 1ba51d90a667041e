"""The cursor: where in the data a run is, so that a resumed run reads on at the next row.

A loader that keeps its own place (`state_dict` and `load_state_dict`, as torchdata's
`StatefulDataLoader`) is asked for it. Any other is replayed: the random state its pass began with
is put back, as many batches are read as were used, and the random state of the checkpoint returns.
A shuffled `DataLoader` therefore gives the very batches that the uninterrupted run would have read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from .errors import CheckpointError
from .snapshot import RandomState, generators
from .stream import Stream

__all__ = ["Cursor"]

Batch = TypeVar("Batch")


@runtime_checkable
class _KeepsItsPlace(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Cursor:
    """The place in the current pass over the data, and the way back to it.

    Attributes:
        num_batches: Used by windows that have ended, in this pass.
        is_shared: Whether all ranks read the same batches in one order and share out each window,
            so that the place is the same on any number of them.
    """

    __slots__ = ("_loader", "_resume", "_start", "_stream", "is_shared", "num_batches")

    def __init__(self) -> None:
        self.num_batches = 0
        self.is_shared = False
        self._loader: object = None
        self._stream: Stream[Any] | None = None
        self._start: dict[str, Any] | None = None
        self._resume: Mapping[str, Any] | None = None

    def open(self, loader: Iterable[Batch]) -> Stream[Batch]:
        """Begin a pass, or go on with the one a checkpoint was saved in.

        Costs, after a load of a loader without a place of its own: reading the used batches again.
        """
        resume, self._resume = self._resume, None
        self._loader = loader
        if resume is not None and resume["start"] is None:
            _catch_up(loader, resume)
            resume = None
        if resume is None:
            self.num_batches = 0
            self._start = _start_of_pass(loader)
            stream = Stream(iter(loader))
        else:
            self.num_batches = resume["num_batches"]
            self._start = resume["start"]
            stream = _resumed(loader, resume)
        self._stream = stream
        return stream

    def mark(self) -> None:
        """Note that every batch handed out so far belongs to a window that has ended."""
        if self._stream is not None:
            self.num_batches = self._stream.num_read

    def close(self) -> None:
        """End the pass: a checkpoint saved from now on begins with the first batch of the next.

        The loader is still known, because where its generators or its own state are now decides the
        order of the next pass.
        """
        self.num_batches = 0
        self._start = None
        self._stream = None

    def state_dict(self) -> dict[str, Any] | None:
        """Give the place in the data; None before the first pass."""
        if self._resume is not None:
            return dict(self._resume)
        if self._loader is None:
            return None
        is_ahead = self._stream is not None and self._stream.is_ahead
        loader_state = None
        if isinstance(self._loader, _KeepsItsPlace):
            if is_ahead:
                raise CheckpointError(
                    "A streamed window was ended before its last microbatch, so one batch has been "
                    "read that no window has used and a stateful loader cannot give back. Save "
                    "after a window that ran to its end."
                )
            loader_state = self._loader.state_dict()
        return {
            "num_batches": self.num_batches,
            "is_ahead": is_ahead,
            "is_over": self._stream is not None and self._stream.is_over,
            "is_shared": self.is_shared,
            "length": _length(self._loader),
            "start": self._start,
            "generators": _generator_states(self._loader),
            "loader": loader_state,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Have the next pass go on from a saved place."""
        self.close()
        self._loader = None
        self._resume = state


def _start_of_pass(loader: object) -> dict[str, Any]:
    return {
        "random": RandomState.capture().state_dict(),
        "generators": _generator_states(loader),
    }


def _generator_states(loader: object) -> list[Tensor]:
    return [generator.get_state() for generator in generators(loader)]


def _set_generators(loader: object, states: list[Tensor]) -> None:
    for generator, state in zip(generators(loader), states, strict=False):
        generator.set_state(state)


def _length(loader: object) -> int | None:
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader over an iterable dataset has `__len__` and no length
        return None


def _catch_up(loader: object, resume: Mapping[str, Any]) -> None:
    """Put a loader where the one before it stood between two passes; another loader has no past."""
    if _length(loader) != resume["length"]:
        return
    _set_generators(loader, resume["generators"])
    if resume["loader"] is not None and isinstance(loader, _KeepsItsPlace):
        loader.load_state_dict(resume["loader"])


def _resumed(loader: Iterable[Batch], resume: Mapping[str, Any]) -> Stream[Batch]:
    num_batches, length = resume["num_batches"], _length(loader)
    if None not in (length, resume["length"]) and length != resume["length"]:
        raise CheckpointError(
            f"The loader has {length} batches; the one this checkpoint was saved with had "
            f"{resume['length']}, so its place in the data means nothing here. Resume with the "
            "same data and batch size."
        )
    now = RandomState.capture()
    if resume["loader"] is not None:
        if not isinstance(loader, _KeepsItsPlace):
            raise CheckpointError(
                "The checkpoint holds a stateful loader's own place, and this loader has no "
                "`load_state_dict`. Resume with the same kind of loader."
            )
        loader.load_state_dict(resume["loader"])
        # One that has reached its end would begin the next pass.
        batches = iter(()) if resume["is_over"] else iter(loader)
    else:
        batches = _replayed(loader, resume["start"], num_batches)
    stream = Stream(batches, num_read=num_batches)
    if resume["is_ahead"]:
        stream.has_next()  # drawn before the checkpoint, so not from the streams it goes on with
    now.restore()
    return stream


def _replayed(loader: Iterable[Batch], start: Mapping[str, Any], count: int) -> Iterator[Batch]:
    RandomState.from_state_dict(start["random"]).restore()
    _set_generators(loader, start["generators"])
    batches = iter(loader)
    for index in range(count):
        try:
            next(batches)
        except StopIteration:
            raise CheckpointError(
                f"The loader ended after {index} batches; the checkpoint was saved after {count} "
                "of a pass, so its place in the data means nothing here. Resume with the same data."
            ) from None
    return batches
