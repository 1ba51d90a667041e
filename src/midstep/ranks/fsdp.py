"""What FSDP2 keeps to itself and offers no other way to: read in one place, for torch 2.9 to 2.13.

A parameter group is what one `fully_shard` call gathers and reduces together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["Group", "fsdp_groups", "reset", "roots_of"]


class Group:
    """One parameter group of FSDP2."""

    __slots__ = ("_group",)

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def sharded(self) -> list[nn.Parameter]:
        """The parameters as the optimizer has them."""
        return [parameter.sharded_param for parameter in self._group.fsdp_params]

    @property
    def reduces_in(self) -> set[torch.dtype]:
        """In which dtypes gradients are summed, over microbatches and ranks."""
        policy = self._group.mp_policy.reduce_dtype
        return {policy or p.dtype for p in self.sharded if p.requires_grad}

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """Over whom gradients are added up: replicas first, then shards."""
        info = self._group.mesh_info
        axes = (info.replicate_mesh_dim, info.shard_mesh_dim)
        return [info.mesh.get_group(axis) for axis in axes if axis is not None]

    @property
    def data_parallel_size(self) -> int:
        """Over how many ranks gradients are added up."""
        return math.prod(map(dist.get_world_size, self.process_groups))

    def hidden_gradients(self) -> Iterator[Tensor]:
        """Gradients of backwards that were not reduced: whole, and of this rank alone."""
        for parameter in self._group.fsdp_params:
            accumulated = parameter.unsharded_accumulated_grad
            whole = getattr(parameter, "_unsharded_param", None)
            for grad in (accumulated, None if whole is None else whole.grad):
                if grad is not None:
                    yield grad
        if self._group._partial_reduce_output is not None:  # noqa: SLF001 - see above
            yield self._group._partial_reduce_output  # noqa: SLF001

    def forget(self) -> None:
        """Drop gradients of backwards that were not reduced."""
        for parameter in self._group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None  # noqa: SLF001 - see above
        self._group._partial_reduce_output = None  # noqa: SLF001


def fsdp_groups(modules: Sequence[FSDPModule]) -> Iterator[Group]:
    """Give the parameter groups of some modules, each once."""
    seen: set[int] = set()
    for module in modules:
        state: Any = module._get_fsdp_state()  # noqa: SLF001 - torch has no other way
        groups = getattr(state, "_fsdp_param_groups", None)  # one only before torch 2.13
        for group in [state._fsdp_param_group] if groups is None else groups:  # noqa: SLF001
            if group is not None and id(group) not in seen:
                seen.add(id(group))
                yield Group(group)


def reset(roots: Sequence[FSDPModule]) -> None:
    """End an iteration that was broken off, so that the next begins as the first did."""
    for root in roots:
        state: Any = root._get_fsdp_state()  # noqa: SLF001 - torch has no other way
        if state._is_root and hasattr(root, "reset_iter_state"):  # noqa: SLF001 - since torch 2.13
            root.reset_iter_state()


def roots_of(modules: Sequence[FSDPModule]) -> list[FSDPModule]:
    """Leave out what lies inside another; the rest are called from outside."""
    inner = {
        id(child)
        for module in modules
        if isinstance(module, nn.Module)
        for child in module.modules()
        if child is not module
    }
    return [module for module in modules if id(module) not in inner]
