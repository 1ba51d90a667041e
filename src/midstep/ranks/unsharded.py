"""Trained parameters that FSDP2 does not manage: whose they are, and how their gradients add up.

Such a parameter is the same on all ranks when every rank has one of that name, and a rank's own (an
expert, say) when only some do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .fingerprint import fingerprint
from .fsdp import fsdp_groups
from .locals import split_dim
from .world import World

__all__ = ["Unsharded"]


class Unsharded:
    """Adds up, over the ranks that see different data, what FSDP2 leaves alone.

    Args:
        model: The model.
        modules: Every module `fully_shard` was applied to.
        groups: The process groups that the data is split over, one after the other.
        world: The ranks.

    Raises:
        ValueError: A parameter that every rank has is not the same on all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[FSDPModule],
        groups: Sequence[dist.ProcessGroup],
        world: World,
    ) -> None:
        self._groups = [group for group in groups if dist.get_world_size(group) > 1]
        managed = {p for group in fsdp_groups(modules) for p in group.sharded}
        named = {name: p for name, p in model.named_parameters() if p not in managed}
        everyone = world.gather_objects({name: _mark(p) for name, p in named.items()})
        common = set.intersection(*(set(theirs) for theirs in everyone))
        self._own = {p for name, p in named.items() if name not in common}
        self._shared = [p for name, p in named.items() if name in common]
        for name in sorted(common):
            if len({theirs[name] for theirs in everyone}) > 1:
                raise ValueError(
                    f"`Updater`: `{name}` is not sharded and differs between ranks, so it would "
                    "train as several models. Make it the same on all ranks before, or, if each "
                    "rank has one of its own, give it a name of its own on each."
                )

    def is_own(self, parameter: Tensor) -> bool:
        """Whether only some ranks have it, and nobody adds it up."""
        return parameter in self._own

    @torch.no_grad()
    def add_up(self) -> None:
        """Sum the gradients over the ranks: one all-reduce a dtype and axis of the mesh.

        What no rank has a gradient of keeps none.
        """
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._shared if self._groups else ():
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            self._add_up(parameters)

    def _add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        parts = [_local(p.grad) if p.grad is not None else None for p in parameters]
        wholes = [_local(p) for p in parameters]
        has = wholes[0].new_tensor([float(part is not None) for part in parts])
        flat = [
            torch.zeros_like(whole).flatten() if part is None else part.flatten()
            for whole, part in zip(wholes, parts, strict=True)
        ]
        total = torch.cat([*flat, has])
        for group in self._groups:
            dist.all_reduce(total, group=group)
        sums = torch.split(total, [*(part.numel() for part in flat), len(parts)])
        for parameter, part, found, n in zip(
            parameters, parts, sums, sums[-1].tolist(), strict=False
        ):
            if n and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                part = _local(parameter.grad)  # noqa: PLW2901 - the one just made
            if n and part is not None:
                part.copy_(found.view_as(part))


def _local(tensor: Tensor) -> Tensor:
    """The memory that holds what of a tensor lies here."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _mark(parameter: Tensor) -> str:
    """What must be equal on all ranks; of a split tensor that is not its part."""
    if isinstance(parameter, DTensor) and any(
        split_dim(p) is not None for p in parameter.placements
    ):
        return f"{list(parameter.shape)}"
    return f"{list(parameter.shape)} {fingerprint(parameter)}"
