"""Parallel: how a model shares its work among ranks, and when its ranks must talk.

DDP and FSDP2 do the talking; this package only drives them: once a window, on its last microbatch.
What they divide by is undone in the seed of the backward, so that ranks *add up*.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .replicated import DataParallel
from .sharded import FullySharded, Sharding
from .world import World

__all__ = ["Parallel", "parallel_of"]


class Parallel(Protocol):
    """How the ranks of a model share its work."""

    @property
    def data_parallel_size(self) -> int:
        """Over how many ranks the data is split; ranks that see the same data count once."""
        ...

    @property
    def seed_factor(self) -> float:
        """What a seed is multiplied by, so that gradients add up over the ranks."""
        ...

    @property
    def is_lockstep(self) -> bool:
        """Whether every forward and backward needs all ranks, so that all must run equally many."""
        ...

    @property
    def needs_calls(self) -> bool:
        """Whether this rank could not take part in a forward, having seen no arguments for one."""
        ...

    @property
    def runs_alone(self) -> bool:
        """Whether a rank can run a forward and backward by itself, as often as it likes."""
        ...

    @property
    def is_split(self) -> bool:
        """Whether a gradient lies on the ranks in parts, not whole on each."""
        ...

    def widen(self) -> Iterable[torch.dtype]:
        """Add up gradients that autograd has summed in float32; give the dtypes it is done in."""
        ...

    def begin(
        self, num_microbatches: int, *, lends: bool, syncs_late: bool, reruns: bool = False
    ) -> None:
        """Begin a window.

        Args:
            num_microbatches: How many forwards and backwards it takes where ranks run in lockstep.
            lends: Whether some rank needs the arguments of another's forwards.
            syncs_late: Whether gradients are added up by `finish`, not in the last backward.
            reruns: Whether ranks may run their parts again, each by itself, until `finish`.
        """
        ...

    def begin_again(self) -> None:
        """Begin a window once more that ranks may run again. No collective."""
        ...

    def before_forward(self, *, index: int, is_last: bool) -> None:
        """Get ready for one microbatch."""
        ...

    def after_forward(self, *, failed: bool) -> None:
        """Put back what a forward alone needed; with no other rank where it failed."""
        ...

    def after_backward(self) -> None:
        """Note that a backward ran that was to add up the gradients."""
        ...

    def finish(self) -> None:
        """Take part in what this rank had no microbatch for, and add up the gradients."""
        ...

    def claims(self) -> list[float]:
        """Give numbers, equally many on all ranks, that `settle` needs the sums of."""
        ...

    def settle(self, sums: Sequence[float]) -> None:
        """End what `finish` left open, knowing what all ranks claim."""
        ...

    def forget_calls(self) -> None:
        """Never run the last forwards again, since they brought what is not finite."""
        ...

    def discard(self) -> None:
        """Forget what the backwards of a window left outside `.grad`, and what broke them off."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Run the microbatches of this window again, their gradients added up by nobody."""
        ...

    def hidden_gradients(self) -> Sequence[Tensor]:
        """What the backwards of this window left outside `.grad`, on this rank alone."""
        ...

    def is_own(self, parameter: Tensor) -> bool:
        """Whether a parameter is this rank's alone: never added up, and another on every rank."""
        ...


def parallel_of(model: nn.Module, world: World, sharding: Sharding | None) -> Parallel:
    """Recognise how a model is parallel.

    Raises:
        NotImplementedError: FSDP1, whose flat shards have no per-tensor norm, or a static graph.
        ValueError: Several ranks and nothing that would add up their gradients.
    """
    modules = list(model.modules())
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise NotImplementedError(
            "`Updater`: the model is wrapped in FSDP1, whose flat shards have neither per-tensor "
            "norms nor a factor of their own. Use `fully_shard` (FSDP2)."
        )
    sharded = [module for module in modules if isinstance(module, FSDPModule)]
    if sharded:
        return FullySharded(model, sharded, sharding or Sharding(), world)
    if sharding is not None:
        raise ValueError(
            f"`Updater(sharding={sharding})`: the model is not sharded by `fully_shard`, so there "
            "is nothing to trade. Leave it out."
        )
    wrapper = _unwrapped(model)
    if isinstance(wrapper, DistributedDataParallel):
        return DataParallel(wrapper, world)
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        raise NotImplementedError(
            f"`Updater`: parts of the `{type(model).__name__}` are wrapped in DDP and it is not, "
            "so nobody would add up the rest. Wrap the whole model."
        )
    if any(isinstance(p, DTensor) for p in model.parameters()):
        return TensorParallel(is_split=True)
    if world.size > 1:
        raise ValueError(
            f"`Updater`: {world.size} ranks and a plain `{type(model).__name__}`, whose gradients "
            "nobody would add up, so the ranks would drift apart. Wrap it in DDP or `fully_shard`."
        )
    return TensorParallel(is_split=False)


def _unwrapped(model: nn.Module) -> nn.Module:
    inner: Any = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


class TensorParallel:
    """Ranks that split tensors and see the same data; nothing is left to add up."""

    data_parallel_size = 1
    seed_factor = 1.0
    is_lockstep = False
    needs_calls = False

    def __init__(self, *, is_split: bool) -> None:
        self.is_split = is_split
        self.runs_alone = not is_split

    def widen(self) -> Iterable[torch.dtype]:
        """Nothing is added up."""
        return ()

    def begin(
        self, num_microbatches: int, *, lends: bool, syncs_late: bool, reruns: bool = False
    ) -> None:
        """Nothing to get ready."""

    def begin_again(self) -> None:
        """Nothing to get ready."""

    def before_forward(self, *, index: int, is_last: bool) -> None:
        """Nothing to get ready."""

    def after_forward(self, *, failed: bool) -> None:
        """Nothing to put back."""

    def after_backward(self) -> None:
        """Nothing to note."""

    def finish(self) -> None:
        """Nothing to add up."""

    def claims(self) -> list[float]:
        """Nothing to claim."""
        return []

    def settle(self, sums: Sequence[float]) -> None:
        """Nothing is open."""

    def forget_calls(self) -> None:
        """None is run again."""

    def discard(self) -> None:
        """Nothing lies elsewhere."""

    def alone(self) -> AbstractContextManager[None]:
        """Nothing is different."""
        return nullcontext()

    def hidden_gradients(self) -> Sequence[Tensor]:
        """Nothing lies elsewhere."""
        return ()

    def is_own(self, parameter: Tensor) -> bool:
        """None is: a plain parameter lies on every rank."""
        return False
