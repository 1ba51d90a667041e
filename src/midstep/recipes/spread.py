"""Spreading: one recipe over many ranks, with nothing in it changed.

The model is wrapped, the data is shared out, files are written by the first rank, and whatever a
rank must not decide alone (to stop, to measure, to give up) is decided together.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..cutting import Cutting
from ..errors import RankFailure, RecipeError
from ..snapshot import Buffers
from ..updater import Updater
from .loading import seed_everything
from .share import ELSEWHERE, Share, Shared, Turns, require_turns, shared

if TYPE_CHECKING:
    from ..ranks.world import World

__all__ = ["Spread", "replicated", "sharded"]

T = TypeVar("T")
Wrap = Callable[[nn.Module], nn.Module]

_START_SECONDS = 600  # for all ranks to arrive, and for the longest collective


class Spread:
    """How a run is spread over ranks; made without a world it is one process alone.

    Attributes:
        rank: This rank.
        num_ranks: How many there are.
        world: How this rank talks to the others; None for one alone.
    """

    def __init__(self, world: World | None = None, wrap: Wrap | None = None) -> None:
        self.world = world
        self.rank = 0 if world is None else world.rank
        self.num_ranks = 1 if world is None else world.size
        self._wrap = wrap

    @classmethod
    @contextlib.contextmanager
    def begin(cls, wrap: Wrap, device: torch.device) -> Iterator[Spread]:
        """Meet the other ranks where the environment says, and part from them at the end.

        Args:
            wrap: How they share a model: `replicated` or `sharded`.
            device: Of the model; decides what they talk over: NCCL for CUDA, gloo for the CPU.

        Raises:
            RankFailure: Another rank failed in here, or is gone.
        """
        from ..ranks.world import World

        dist.init_process_group(
            dist.get_default_backend_for_device(device),
            timeout=dt.timedelta(seconds=_START_SECONDS),
        )
        world = World()
        with world.failing():
            yield cls(world, wrap)
            world.sum([0.0])  # nobody leaves while another may need the store
        dist.destroy_process_group()

    # -- what is decided together ---------------------------------------------------------------

    def first(self, action: Callable[[], T]) -> T:
        """Do something on the first rank, and give its result on all. One small gather.

        Raises:
            RankFailure: It failed there; the first rank raises what it failed with.
        """
        if self.world is None:
            return action()
        found: list[T] = []
        failure: Exception | None = None
        if self.rank == 0:
            try:
                found.append(action())
            except Exception as error:  # noqa: BLE001 - it is raised below
                failure = error
                failure.on_all_ranks = True  # type: ignore[attr-defined]
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        result, message = self.world.gather_objects((found, said))[0]
        if failure is not None:
            raise failure
        if message is not None:
            raise RankFailure(f"Rank 0 failed: {message}", rank=0)  # and has said so
        only: T = result[0]
        return only

    def any_of(self, value: T | None) -> T | None:
        """Give what any rank has, the lowest first; None where none has. One small gather."""
        everyone = [value] if self.world is None else self.world.gather_objects(value)
        return next((theirs for theirs in everyone if theirs is not None), None)

    def added_up(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Add up numbers by name over all ranks. One small gather."""
        everyone = [numbers] if self.world is None else self.world.gather_objects(dict(numbers))
        totals: dict[str, float] = {}
        for theirs in everyone:
            for name, number in theirs.items():
                totals[name] = totals.get(name, 0) + number
        return totals

    def agreed(self, wants: Callable[[], bool], updater: Updater) -> Agreed:
        """Have all ranks end the run after the same update when any of them is asked to."""
        return Agreed(wants, updater, self.world)

    def require_alike(self, what: str, mark: object, hint: str) -> None:
        """Refuse to go on where ranks differ in what must be the same. One small gather.

        Args:
            what: What it is, for the message.
            mark: Equal on all ranks where it is the same.
            hint: What to do.

        Raises:
            RecipeError: They differ. Every rank raises it.
        """
        if self.world is None:
            return
        marks = self.world.gather_objects(mark)
        others = [rank for rank, theirs in enumerate(marks) if theirs != marks[0]]
        if others:
            who = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
            error = RecipeError(f"`recipe(seed)` gave {who} {what} than rank 0. {hint}")
            error.on_all_ranks = True
            raise error

    # -- the model ------------------------------------------------------------------------------

    def wrap(self, model: nn.Module, *, seed: int) -> nn.Module:
        """Give the model as the updater needs it, and each rank random streams of its own.

        The first rank keeps those of one process, so that a run of one rank is the run of none.

        Raises:
            RecipeError: The ranks made different models.
        """
        if self.world is None or self._wrap is None:
            return model
        from ..ranks.fingerprint import fingerprint

        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.require_alike(
            "other weights",
            [(name, list(tensor.shape), fingerprint(tensor)) for name, tensor in tensors],
            "Draw everything in it from the seed, so that all ranks begin with one model.",
        )
        wrapped = self._wrap(model)
        if self.rank:
            seed_everything((seed + 1_000_003 * self.rank) % 2**32)
        return wrapped

    @contextlib.contextmanager
    def buffers_alike(self, model: nn.Module) -> Iterator[None]:
        """Have every rank measure with the first rank's buffers, as BatchNorm's running means."""
        if self.world is None:
            yield
            return
        own = Buffers(model)
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        try:
            yield
        finally:
            own.restore()

    # -- the data -------------------------------------------------------------------------------

    def share(
        self, loader: Iterable[Any], way: Cutting, size: int | None, *, seed: int
    ) -> tuple[Shared, Cutting]:
        """Give the loader and the way to cut it, as this rank needs them.

        Args:
            loader: The batches of one epoch.
            way: How one process would cut them.
            size: Batches a window; None where they are not counted.
            seed: Of the run.

        Raises:
            ValueError: Fewer batches make a window than there are ranks.
        """
        require_turns(size, self.num_ranks)
        part = Share(self.rank, self.num_ranks, size)
        data = shared(loader, part, seed=seed)
        return data, way if self.num_ranks == 1 else Turns(way, part)

    def rounds(self, loader: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
        """Give this rank's turns of some batches, equally many on all ranks.

        Yields:
            A batch, and whether it is this rank's; where none is left, one to run all the same.
        """
        if self.world is None:
            yield from ((batch, True) for batch in loader)
            return
        data = iter(shared(loader, Share(self.rank, self.num_ranks, self.num_ranks), seed=0))
        kept: Any = ELSEWHERE
        while True:
            turn = list(itertools.islice(data, self.num_ranks))
            if not turn:
                return
            is_own = self.rank < len(turn)
            if is_own:
                kept = turn[self.rank]
            elif kept is ELSEWHERE:
                kept = next(iter(loader))
            yield kept, is_own


class Agreed:
    """Whether the run is to end, asked alike by all ranks.

    Args:
        wants: Whether this one wants it to.
        updater: Whose windows carry the question, for nothing.
        world: The ranks; None for one alone.
    """

    def __init__(self, wants: Callable[[], bool], updater: Updater, world: World | None) -> None:
        self._wants = wants
        self._world = world
        self._opener: Any = None
        ranks = updater._ranks  # noqa: SLF001 - windows carry the question
        if world is not None and ranks is not None:
            self._opener = ranks.opener
            self._opener.asks_to_end = wants

    def __call__(self) -> bool:
        """Whether any rank wanted it when the last window was opened. No collective."""
        return self._wants() if self._opener is None else bool(self._opener.is_asked_to_end)

    def now(self) -> bool:
        """Whether any rank wants it by now. One small all-reduce."""
        if self._world is None or self._opener is None:
            return self._wants()
        if self._world.sum([float(self._wants())])[0]:
            self._opener.is_asked_to_end = True
        return self()


def replicated(model: nn.Module) -> nn.Module:
    """Wrap a model in DDP: whole on every rank, gradients added up."""
    return _answering()(model)


def sharded(model: nn.Module) -> nn.Module:
    """Shard a model by FSDP2, block by block: parameters, gradients and optimizer state.

    Blocks are what the outermost lists of modules hold (`ModuleList`, `Sequential`); what is left
    is the root's.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        if not is_list:
            yield from _blocks(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _answering() -> type[nn.Module]:
    """Make DDP answer for its model: what a loss asks of it by name, it finds."""
    from torch.nn.parallel import DistributedDataParallel

    class Replicated(DistributedDataParallel):
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name == "module":  # not there yet
                    raise
                return getattr(self.module, name)

    return Replicated
