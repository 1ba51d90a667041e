"""Units: rows, filters and vectors whose entries may lie on several ranks, and their norms.

A unit is all that has one index in dim 0; a vector or a number is one unit. Ranks that split dim 0
of a matrix hold whole units each; those that split another dim, or a vector, hold parts of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .locals import split_dim

__all__ = ["whole_units"]


@torch.no_grad()
def whole_units(parameters: Sequence[Tensor], norms: Sequence[Tensor]) -> list[Tensor]:
    """Make the norms of whole units out of those of what lies here.

    One gather for each axis of a mesh along which any unit is split, of 8 bytes a norm and rank;
    all ranks of a mesh must ask alike.

    Args:
        parameters: Whose units they are.
        norms: Of what lies here, of each parameter; float64.
    """
    found = list(norms)
    for (mesh, axis), where in _split_units(parameters).items():
        own = torch.cat([found[index].flatten() for index in where])
        rows = [torch.empty_like(own) for _ in range(mesh.size(axis))]
        dist.all_gather(rows, own, group=mesh.get_group(axis))
        parts = torch.stack(rows)  # [ranks, norms]
        largest = parts.amax(dim=0)
        scaled = parts / largest.where(largest > 0, 1.0)
        joined = largest * scaled.square().sum(dim=0).sqrt()
        pieces = torch.split(joined, [found[index].numel() for index in where])
        for index, piece in zip(where, pieces, strict=True):
            found[index] = piece.view_as(found[index])
    return found


def _split_units(parameters: Sequence[Tensor]) -> dict[tuple[DeviceMesh, int], list[int]]:
    """Find the axes along which units are split, and the positions of the parameters there."""
    found: dict[tuple[DeviceMesh, int], list[int]] = {}
    for index, parameter in enumerate(parameters):
        if not isinstance(parameter, DTensor) or parameter.device_mesh.get_coordinate() is None:
            continue
        for axis, placement in enumerate(parameter.placements):
            dim = split_dim(placement)
            if dim is not None and (dim > 0 or parameter.ndim == 1):
                found.setdefault((parameter.device_mesh, axis), []).append(index)
    return found
