"""The world: how one rank talks to the others, in one small collective at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import NotAgreed, RankFailure
from .board import Board

__all__ = ["World"]


class World:
    """All ranks that train together, seen from one of them.

    Attributes:
        rank: This rank.
        size: How many there are.
        num_collectives: How many collectives this object has run, for those who count.
        is_inside: Whether a collective has begun and not ended, as one that failed.
        is_agreeing: Whether a rank that fails can still take the others back; see `agreeing`.
        board: Where ranks post that they failed; None for one rank alone.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.num_collectives = 0
        self._num_windows = 0
        self._tolerates: Callable[[BaseException], bool] | None = None
        self.is_agreeing = False
        self.is_inside = False
        backend = dist.get_backend()
        self._device = torch.device("cpu")
        if "gloo" not in backend and "mpi" not in backend:
            self._device = torch.device(torch.accelerator.current_accelerator() or "cpu")
        self.board: Board | None = None
        if self.size > 1:
            self.board = Board(self.rank, self.size, self._next_number())

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up each number over all ranks, in float64. One all-reduce of 8 bytes a number."""
        if self.size == 1:
            return list(values)
        buffer = torch.tensor(values, dtype=torch.float64, device=self._device)
        self.agree()
        with self.inside():
            dist.all_reduce(buffer)
        found: list[float] = buffer.tolist()
        return found

    def sums(self, vectors: Sequence[Sequence[float] | Tensor]) -> list[Sequence[float] | Tensor]:
        """Add up vectors over all ranks, in float64, in one all-reduce for all of them.

        Waits for no accelerator where the collective runs on it; what it gives lies there.
        """
        if self.size == 1:
            return list(vectors)
        parts = [
            # To the host it must wait, or the numbers would be added up before they are there.
            torch.as_tensor(v, dtype=torch.float64).to(
                self._device, non_blocking=self._device.type != "cpu"
            )
            for v in vectors
        ]
        buffer = torch.cat(parts)
        self.agree()
        with self.inside():
            dist.all_reduce(buffer)
        return list(torch.split(buffer, [len(part) for part in parts]))

    def add_up_(self, numbers: Tensor) -> None:
        """Add up numbers over all ranks, where they lie. The host waits for no accelerator."""
        if self.size > 1:
            self.agree()
            with self.inside():
                dist.all_reduce(numbers)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Give every rank's numbers, by rank. One all-gather of 8 bytes a number and rank."""
        if self.size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64, device=self._device)
        everyone = [torch.empty_like(own) for _ in range(self.size)]
        self.agree()
        with self.inside():
            dist.all_gather(everyone, own)
        rows: list[list[float]] = torch.stack(everyone).tolist()
        return rows

    def gather_objects(self, value: Any) -> list[Any]:
        """Give every rank's object, by rank; for what happens once, or on the way to an error."""
        if self.size == 1:
            return [value]
        self.agree()
        everyone: list[Any] = [None] * self.size
        with self.inside():
            dist.all_gather_object(everyone, value)
        return everyone

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Tell the other ranks of an error in here, or say which rank broke the collective.

        An error that every rank raises alike is nobody's failure.
        """
        board = self.board
        if board is None:
            yield
            return
        board.depth += 1
        try:
            yield
        except RankFailure:
            raise
        except BaseException as error:
            if getattr(error, "on_all_ranks", False):
                raise
            if self._tolerates is not None and self._tolerates(error):
                raise
            failure = board.failure
            if isinstance(error, RuntimeError) and _is_of_a_collective(error):
                failure = board.explained(error)
            if failure is not None and isinstance(error, RuntimeError):
                for note in getattr(error, "__notes__", ()):
                    failure.add_note(note)
                raise failure from error
            board.post(f"{type(error).__name__}: {error}")
            raise
        finally:
            board.depth -= 1

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Run one collective; whoever fails in here can take part in no other."""
        self.num_collectives += 1
        self.is_inside = True
        yield
        self.is_inside = False

    @contextlib.contextmanager
    def agreeing(self, is_tolerated: Callable[[BaseException], bool]) -> Iterator[None]:
        """Have a rank that fails in here take the others back with it, until `agreed`.

        Before each collective in here the ranks ask each other whether all of them are well: one
        more all-reduce of 8 bytes. So nobody is left in a collective by one that is not.

        Args:
            is_tolerated: Whether a rank recovers from such an error, so that it is no failure.
        """
        self._tolerates, self.is_agreeing = is_tolerated, True
        try:
            yield
        finally:
            self._tolerates, self.is_agreeing = None, False

    def agree(self, *, is_well: bool = True) -> None:
        """Ask inside `agreeing` whether all ranks are well. No cost elsewhere.

        Raises:
            NotAgreed: Some are not; on all ranks alike.
        """
        if self.size == 1 or not self.is_agreeing:
            return
        num_ill = torch.full((1,), float(not is_well), dtype=torch.float64, device=self._device)
        with self.inside():
            dist.all_reduce(num_ill)
        if self._read(num_ill):
            raise NotAgreed("another rank ran out of memory")

    def _read(self, number: torch.Tensor) -> float:
        """Read what all ranks have agreed on: who failed in here would go another way than they."""
        try:
            return number.item()
        except Exception as error:
            if self._tolerates is None or not self._tolerates(error):
                raise
        return number.item()

    def agreed(self) -> None:
        """Agree for the last time; from here on no rank can take the others back.

        Raises:
            NotAgreed: Some ranks are not well; on all ranks alike.
        """
        self.agree()
        self._tolerates, self.is_agreeing = None, False

    def check(self) -> None:
        """Refuse to begin a window that not all ranks can take part in. Costs nothing.

        Raises:
            RankFailure: A rank has failed, or some left the last window and others did not.
        """
        if self.board is None:
            return
        failure = self.board.failure or self.board.settle()
        if failure is not None:
            raise failure

    def enter_window(self) -> None:
        """Note that all ranks have opened a window."""
        self._num_windows += 1
        if self.board is not None:
            self.board.window = self._num_windows

    def end_window(self) -> None:
        """Note that the window was stepped, or ended on all ranks alike."""
        if self.board is not None:
            self.board.window = 0

    def leave_window(self) -> None:
        """Note that this rank left the window without a step, which is a fault if others do not."""
        if self.board is not None and self.board.window:
            self.board.leave_window()

    def _next_number(self) -> int:
        """Number the boards of a process group, so that none reads another's news."""
        store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the only way
        own = float(store.add("midstep/num boards", 1)) if self.rank == 0 else 0.0
        return int(self.gather([own])[0][0])


def _is_of_a_collective(error: RuntimeError) -> bool:
    # gloo raises bare RuntimeErrors that begin with the place in its own source.
    return isinstance(error, dist.DistError) or "gloo" in str(error)
