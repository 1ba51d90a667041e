"""The launch: how many processes of this command there are, and which of them speaks.

`torchrun` starts a command several times and says so in the environment, as do most schedulers.
Rank 0 speaks for all; another speaks only where rank 0 cannot know what happened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ..errors import RankFailure
from .failures import FAILED, fail
from .options import ParallelName
from .stopping import Stop

if TYPE_CHECKING:
    import torch

    from ..recipes.spread import Spread

__all__ = ["Launch", "Speaker"]

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ARRIVE_SECONDS = 1.0
_LINGER_SECONDS = 5.0  # until rank 0 has spoken and torchrun, which looks often, ends this one


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """Where this process stands among those that were started together.

    Attributes:
        rank: This one; 0 for one process alone.
        num_ranks: How many there are.
        local_rank: This one among those of its machine.
        num_local: How many there are on its machine.
        is_by_torchrun: Whether torchrun started them, which ends all when one ends badly.
        is_together: Whether they were started to find each other at all.

    Example:
        >>> Launch.of({})
        Launch(rank=0, num_ranks=1, local_rank=0, num_local=1, is_by_torchrun=False, ...)
    """

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    num_local: int = 1
    is_by_torchrun: bool = False
    is_together: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Launch:
        """Read it off the environment; one process alone where that names no others."""
        if any(name not in environment for name in _NEEDED):
            return cls()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        found = {name: environment.get(name, "") for name in names}
        numbers = {name: int(text) for name, text in found.items() if text.isdecimal()}
        if not {"RANK", "WORLD_SIZE"} <= numbers.keys():
            return cls()
        return cls(
            rank=numbers["RANK"],
            num_ranks=numbers["WORLD_SIZE"],
            local_rank=numbers.get("LOCAL_RANK", 0),
            num_local=numbers.get("LOCAL_WORLD_SIZE", 1),
            is_by_torchrun="TORCHELASTIC_RUN_ID" in environment,
            is_together=True,
        )

    def parallel(
        self, typed: ParallelName | None, begun: ParallelName | None = None
    ) -> ParallelName | None:
        """Decide how the ranks share a model; None for one process alone.

        Args:
            typed: What was asked for now.
            begun: What the run was begun with.

        Raises:
            ValueError: One process cannot be parallel, or several are not told how.
        """
        if typed is not None and not self.is_together:
            raise ValueError(
                f"`--parallel {typed}` in one process: there is nobody to share the model with. "
                "Start the command by torchrun, as in `torchrun --nproc-per-node 2 -m midstep "
                f"train ... --parallel {typed}`, or leave the option out."
            )
        found = (typed or begun) if self.is_together else None
        if found is None and self.num_ranks > 1:
            raise ValueError(
                f"{self.num_ranks} processes were started and nothing says how they share the "
                "model, so each would train one of its own. Add `--parallel ddp` (the model whole "
                "on each) or `--parallel fsdp` (in shards), or start one process."
            )
        return found

    def use_own_device(self) -> None:
        """Have `cuda` mean the device of this process, where there is one. Imports torch."""
        import torch

        if self.is_together and torch.cuda.is_available():
            torch.cuda.set_device(self.local_rank)

    def command(self, *arguments: str) -> str:
        """Spell a command so that it can be pasted, whichever way this one was called."""
        called = os.path.basename(sys.argv[0])  # noqa: PTH119 - no file that is opened
        midstep = ["python", "-m", "midstep"] if called == "__main__.py" else [called]
        if self.is_by_torchrun:
            midstep = ["torchrun", "--nproc-per-node", str(self.num_local), "-m", "midstep"]
            if self.num_ranks > self.num_local:
                midstep.insert(1, f"--nnodes={self.num_ranks // self.num_local}")
        return shlex.join([*midstep, *arguments])


class Speaker:
    """Says why the command ends, on the rank that should. A context, for the signals it holds.

    Under torchrun the first process to end badly has all others ended by SIGTERM. A rank that has
    yet to speak, or a checkpoint to save, must outlive that.

    Attributes:
        launch: Which rank this is.
        stop: Whether somebody asked this rank to stop.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.stop = Stop()
        self._has_met = False
        self._signals = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self.launch.rank and threading.current_thread() is threading.main_thread():
            # Ended because another failed: that is no reason of this one's own.
            before = signal.signal(signal.SIGTERM, lambda *_: os._exit(FAILED))
            self._signals.callback(signal.signal, signal.SIGTERM, before)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._signals.close()

    @contextlib.contextmanager
    def spread(self, parallel: ParallelName | None, device: torch.device) -> Iterator[Spread]:
        """Meet the other ranks, and part from them at the end. Imports torch.

        Args:
            parallel: How they share the model; None for one process alone.
            device: Of the model.
        """
        from ..recipes.spread import Spread, replicated, sharded

        if parallel is None:
            yield Spread()
            return
        wraps = {ParallelName.DDP: replicated, ParallelName.FSDP: sharded}
        with Spread.begin(wraps[parallel], device) as spread:
            self._signals.enter_context(self.stop.listening())
            self._has_met = True
            yield spread

    def __call__(self, message: str, error: BaseException) -> None:
        """Write the line: rank 0 at once, another where rank 0 cannot know or is gone.

        Args:
            message: The one line.
            error: What it is about; of a warning only rank 0 speaks.
        """
        rank, is_warning = self.launch.rank, isinstance(error, Warning)
        is_first_lost = isinstance(error, RankFailure) and error.is_lost and error.rank == 0
        if rank == 0 or (rank == 1 and is_first_lost):
            fail(message)
            if self.launch.is_by_torchrun and not self._has_met and not is_warning:
                time.sleep(_ARRIVE_SECONDS)  # the others come to the same end, by themselves
        elif not is_warning and not self._has_met:
            time.sleep(_LINGER_SECONDS)
            fail(f"rank {rank}: {message}")
