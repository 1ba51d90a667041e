"""All knowledge that other ranks exist."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["refuse_many_ranks"]


def refuse_many_ranks(model: torch.nn.Module, parameters: Iterable[Tensor]) -> None:
    """Refuse what would be wrong without a word: a denominator or a norm of one rank alone.

    Raises:
        NotImplementedError: Several ranks take part, or a parameter is sharded.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise NotImplementedError(
            f"`Updater` on {dist.get_world_size()} ranks: denominators and norms would be those of "
            "one rank alone. This version of midstep trains on one rank."
        )
    for parameter in parameters:
        if hasattr(parameter, "device_mesh"):
            raise NotImplementedError(
                f"`Updater`: a parameter of `{type(model).__name__}` is a DTensor, whose norm "
                "would be that of one shard. This version of midstep trains plain tensors."
            )
