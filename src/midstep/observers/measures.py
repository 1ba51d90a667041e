"""Measures: norms that stay where their tensors are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..gradients import tensor_norms

__all__ = ["norms_of", "root", "squared", "wide"]


def norms_of(tensors: Sequence[Tensor]) -> list[float] | Tensor:
    """Measure the L2 norm of each tensor, at any magnitude, and wait for no accelerator.

    Returns:
        Numbers where all tensors are in host memory, else a float64 tensor on the device of the
        first.
    """
    if all(t.is_cpu for t in tensors):
        return tensor_norms(tensors)
    device = next(t.device for t in tensors if not t.is_cpu)
    real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    dtype = wide(device)
    if all(t.device == device for t in real):
        return torch.stack(torch._foreach_norm(real, 2.0, dtype=dtype))
    each = [torch._foreach_norm([t], 2.0, dtype=dtype)[0] for t in real]
    return torch.stack([norm.to(device) for norm in each])


def squared(norms: Sequence[float] | Tensor) -> Sequence[float] | Tensor:
    """Square each norm, where it lies."""
    return norms.square() if isinstance(norms, Tensor) else [norm * norm for norm in norms]


def wide(device: torch.device) -> torch.dtype:
    """The widest dtype of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def root(square: float) -> float:
    """The square root of a sum of squares that rounding may have left below 0."""
    return math.sqrt(square) if square > 0 or math.isnan(square) else 0.0
