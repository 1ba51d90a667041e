"""Locals: what of a tensor lies on this rank."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

__all__ = ["local_gradient", "local_part", "split_dim"]


def split_dim(placement: Placement) -> int | None:
    """Give the dim that a placement splits; None where it splits none.

    `is_shard` says no of the strided shards that `fully_shard` makes of tensors split before.
    """
    if placement.is_replicate() or placement.is_partial():
        return None
    dim: int | None = getattr(placement, "dim", None)
    return dim


def local_gradient(parameter: Tensor) -> Tensor:
    """Give the part of a parameter's gradient that lies here, split as the parameter is.

    Partial sums are added up first, one collective each, and stay added up in `.grad`, whose memory
    this is.
    """
    grad = parameter.grad
    assert grad is not None
    if not isinstance(grad, DTensor):
        return grad
    if isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        parameter.grad = grad = grad.redistribute(placements=parameter.placements)
    local = local_part(grad)
    if any(n > 1 and stride == 0 for n, stride in zip(local.shape, local.stride(), strict=True)):
        with torch.no_grad():  # one number seen as many, which cannot be multiplied in place
            parameter.grad = grad = grad.clone()
        return local_part(grad)
    return local


def local_part(tensor: Tensor) -> Tensor:
    """Give what of a tensor lies here as a plain tensor, in the same memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    if isinstance(local, AsyncCollectiveTensor):
        waited = local.wait()
        assert isinstance(waited, Tensor)
        return waited
    return local
