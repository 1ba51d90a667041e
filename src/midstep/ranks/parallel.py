"""Parallel: how a model shares its work among ranks, and when its ranks must talk.

DDP and FSDP2 do the talking; this module only drives them: once a window, on its last microbatch.
What they divide by is undone in the seed of the backward, so that ranks *add up*.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .sharded import FullySharded, Sharding

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
    def is_synced(self) -> bool:
        """Whether the gradients of this window have been added up over the ranks."""
        ...

    def begin(self, num_microbatches: int, *, lend: bool) -> None:
        """Begin a window in which the fullest rank has so many microbatches."""
        ...

    def before_forward(self, *, index: int, is_last: bool) -> None:
        """Get ready for one microbatch."""
        ...

    def after_forward(self) -> None:
        """Put back what a forward alone needed."""
        ...

    def after_backward(self) -> None:
        """Note that a backward ran that was to add up the gradients."""
        ...

    def finish(self) -> None:
        """Take part in what this rank had no microbatch for, and add up the gradients."""
        ...

    def is_own(self, parameter: Tensor) -> bool:
        """Whether a parameter is this rank's alone: never added up, and another on every rank."""
        ...


def parallel_of(model: nn.Module, world_size: int, sharding: Sharding | None) -> Parallel:
    """Recognise how a model is parallel.

    Raises:
        NotImplementedError: FSDP1, whose flat shards have no per-tensor norm.
        ValueError: Several ranks and nothing that would add up their gradients.
    """
    modules = list(model.modules())
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise NotImplementedError(
            "`Updater`: the model is wrapped in FSDP1, whose flat shards have neither per-tensor "
            "norms nor a factor of their own. Use `fully_shard` (FSDP2)."
        )
    roots = [module for module in modules if isinstance(module, FSDPModule)]
    if roots:
        return FullySharded(model, roots, sharding or Sharding())
    if sharding is not None:
        raise ValueError(
            f"`Updater(sharding={sharding})`: the model is not sharded by `fully_shard`, so there "
            "is nothing to trade. Leave it out."
        )
    wrapper = _unwrapped(model)
    if isinstance(wrapper, DistributedDataParallel):
        return DataParallel(wrapper)
    if any(isinstance(p, DTensor) for p in model.parameters()):
        return TensorParallel()
    if world_size > 1:
        raise ValueError(
            f"`Updater`: {world_size} ranks and a plain `{type(model).__name__}`, whose gradients "
            "nobody would add up, so the ranks would drift apart. Wrap it in DDP or `fully_shard`."
        )
    return TensorParallel()


def _unwrapped(model: nn.Module) -> nn.Module:
    inner: Any = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


class TensorParallel:
    """Ranks that split tensors and see the same data; nothing is left to add up."""

    data_parallel_size = 1
    seed_factor = 1.0
    is_lockstep = False
    is_synced = True

    def begin(self, num_microbatches: int, *, lend: bool) -> None:
        """Nothing to get ready."""

    def before_forward(self, *, index: int, is_last: bool) -> None:
        """Nothing to get ready."""

    def after_forward(self) -> None:
        """Nothing to put back."""

    def after_backward(self) -> None:
        """Nothing to note."""

    def finish(self) -> None:
        """Nothing to add up."""

    def is_own(self, parameter: Tensor) -> bool:
        """None is: a plain parameter lies on every rank."""
        return False


class DataParallel:
    """DistributedDataParallel: every rank has the whole model; buckets are averaged in backward."""

    is_lockstep = False

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self.data_parallel_size = torch.distributed.get_world_size(model.process_group)
        self.seed_factor = float(self.data_parallel_size)  # DDP divides by as much
        self.is_synced = False
        ignored = set(model.parameters_to_ignore)
        names = model.module.named_parameters()
        self._own = {parameter for name, parameter in names if name in ignored}

    def begin(self, num_microbatches: int, *, lend: bool) -> None:
        """Start a window whose gradients are not added up yet."""
        self.is_synced = False

    def before_forward(self, *, index: int, is_last: bool) -> None:
        """Have DDP reduce in the backward of this microbatch, or not; it asks in the forward."""
        self._model.require_backward_grad_sync = is_last

    def after_forward(self) -> None:
        """Leave DDP as it was found."""
        self._model.require_backward_grad_sync = True

    def after_backward(self) -> None:
        """Note that DDP has reduced."""
        self.is_synced = True

    def finish(self) -> None:
        """Reduce with zeros, on a rank whose last microbatch had nothing to reduce."""
        if self.is_synced:
            return
        self.is_synced = True
        module = self._model.module
        # DDP only arms its reducer in its own forward. Running the model's would want a batch and
        # would draw random numbers, so its forward is a sum over its parameters for once.
        trained = [p for p in module.parameters() if p.requires_grad and p not in self._own]
        forward = module.__dict__.get("forward")
        module.forward = lambda: sum(
            (p.flatten()[:1].sum() * 0.0 for p in trained), torch.zeros(())
        )
        try:
            nothing: Tensor = self._model()
            nothing.backward(torch.zeros_like(nothing))  # type: ignore[no-untyped-call]
        finally:
            if forward is None:
                del module.forward
            else:
                module.forward = forward

    def is_own(self, parameter: Tensor) -> bool:
        """Those DDP was told to ignore, such as a rank's experts."""
        return parameter in self._own
