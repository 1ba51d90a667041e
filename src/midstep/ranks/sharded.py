"""FSDP2: parameters, gradients and optimizer state in shards; forward and backward gather them.

Every forward and backward is a collective of all ranks, so ranks that hold fewer microbatches run
the last one again with a seed of 0 until all have run equally many.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from ..snapshot import Buffers, RandomState

__all__ = ["FullySharded", "Sharding"]


@dataclasses.dataclass(frozen=True, slots=True)
class Sharding:
    """What FSDP2 trades inside a window: memory for traffic.

    Attributes:
        reduce_every_microbatch: Reduce and scatter after each microbatch instead of once a window.
            Holds gradients in shards all along (saves one full gradient of memory on every rank)
            for a reduce-scatter a microbatch.
        keep_gathered: Keep the parameters whole between the microbatches of a window. Saves the
            all-gathers of all microbatches but the first, for one full copy of the parameters on
            every rank.

    Example:
        >>> Sharding()
        Sharding(reduce_every_microbatch=False, keep_gathered=False)
    """

    reduce_every_microbatch: bool = False
    keep_gathered: bool = False


class FullySharded:
    """FSDP2 on a mesh of one axis (shard) or two (replicate, shard), tensor parallel or not.

    Args:
        model: The root.
        modules: Every module `fully_shard` was applied to.
        sharding: What to trade.
    """

    seed_factor = 1.0
    is_lockstep = True

    def __init__(self, model: nn.Module, modules: Sequence[FSDPModule], sharding: Sharding) -> None:
        self._model = model
        self._modules = modules
        self._sharding = sharding
        self._groups = _data_parallel_groups(modules)
        self.data_parallel_size = 1
        for group in self._groups:
            self.data_parallel_size *= dist.get_world_size(group)
        for module in modules:
            # Sums over the ranks, not means; gloo and some NCCL versions have no scaled sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self._managed = {p for p in model.parameters() if isinstance(p, DTensor)}
        self._num_run = 0
        self._num_microbatches = 0
        self._lend = False
        self._calls: list[tuple[Any, Any]] = []
        self.is_synced = False
        model.register_forward_pre_hook(self._note_call, with_kwargs=True)

    def begin(self, num_microbatches: int, *, lend: bool) -> None:
        """Start a window of so many forwards and backwards on every rank."""
        self._num_run = 0
        self._num_microbatches = num_microbatches
        self._lend = lend
        self.is_synced = False

    def before_forward(self, *, index: int, is_last: bool) -> None:
        """Reduce and reshard in this backward, or later."""
        self._calls = []
        self._num_run = index + 1
        self._set(is_last=self._num_run == self._num_microbatches)

    def after_forward(self) -> None:
        """Nothing to put back; the flags are asked in backward, too."""

    def after_backward(self) -> None:
        """Nothing to note: how many have run says it."""

    def finish(self) -> None:
        """Run the missing forwards and backwards with a seed of 0, then add up plain parameters."""
        if self._num_run < self._num_microbatches:
            self._run_missing()
        if not self.is_synced:
            self.is_synced = True
            self._add_up_plain()

    def is_own(self, parameter: Tensor) -> bool:
        """None is: a plain parameter lies on every rank, and is added up here."""
        return False

    def _set(self, *, is_last: bool) -> None:
        reduce_now = is_last or self._sharding.reduce_every_microbatch
        keep = self._sharding.keep_gathered and not is_last
        for module in self._modules:
            module.set_requires_gradient_sync(reduce_now, recurse=False)
            module.set_requires_all_reduce(is_last, recurse=False)
            module.set_is_last_backward(is_last)
            if self._sharding.keep_gathered:
                module.set_reshard_after_backward(not keep, recurse=False)

    def _note_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._lend:
            self._lend = False
            self._exchange((args, kwargs))
        self._calls.append((args, kwargs))

    def _exchange(self, call: tuple[Any, Any] | None) -> tuple[Any, Any]:
        """Hand the arguments of one forward to ranks that never ran one; everyone takes part."""
        calls: list[Any] = [None] * dist.get_world_size()
        own = None if call is None else tree_map(_to_host, call)
        dist.all_gather_object(calls, own)
        found: tuple[Any, Any] = next(c for c in calls if c is not None)
        return found

    def _run_missing(self) -> None:
        if self._lend:
            self._lend = False
            self._calls = [self._exchange(None)]
        calls, self._calls = self._calls, []
        after, buffers = RandomState.capture_torch(), Buffers(self._model)
        device = next(self._model.parameters()).device
        while self._num_run < self._num_microbatches:
            self._num_run += 1
            self._set(is_last=self._num_run == self._num_microbatches)
            nothing = torch.zeros((), device=device)
            for call in calls:
                args, kwargs = tree_map(lambda leaf: _to_device(leaf, device), call)
                outputs = tree_leaves(self._model(*args, **kwargs))
                for output in outputs:
                    if isinstance(output, Tensor) and output.requires_grad:
                        nothing = nothing + output.sum() * 0.0
            nothing.backward(torch.zeros_like(nothing))  # type: ignore[no-untyped-call]
        self._calls = calls
        after.restore()
        buffers.restore()

    def _add_up_plain(self) -> None:
        """Sum the gradients of plain parameters, which FSDP2 leaves alone."""
        if self.data_parallel_size == 1:
            return
        for parameter in self._model.parameters():
            if parameter in self._managed or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            for group in self._groups:
                dist.all_reduce(parameter.grad, group=group)


def _data_parallel_groups(modules: Sequence[FSDPModule]) -> list[dist.ProcessGroup]:
    for module in modules:
        group = module._get_fsdp_state()._fsdp_param_group  # noqa: SLF001 - torch has no other way
        if group is None:
            continue
        info: Any = group.mesh_info
        axes = [getattr(info, "replicate_mesh_dim", None), getattr(info, "shard_mesh_dim", None)]
        return [info.mesh.get_group(axis) for axis in axes if axis is not None]
    return []


def _to_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def _to_device(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf
