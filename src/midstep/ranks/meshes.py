"""Meshes: norms of tensors some of which are split, for those who keep their own step.

Each DTensor says by itself which ranks hold it and in what parts, so nothing else need be known:
neither how the model is wrapped nor what its optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from .joint import joint_norm
from .locals import local_part, split_dim

__all__ = ["Meshes", "part_of"]


def part_of(tensor: Tensor) -> Tensor:
    """Give what of a tensor lies here; partial sums are added up first, into a new tensor."""
    if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
        summed = [Replicate() if p.is_partial() else p for p in tensor.placements]
        tensor = tensor.redistribute(placements=summed)
    return local_part(tensor)


class Meshes:
    """What is to be known of tensors to join what their parts say.

    One small collective for each axis of each mesh along which any of them is split. All ranks of a
    mesh must ask alike, with the same tensors in the same order.

    Args:
        tensors: DTensors and plain ones, which count as they are.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._axes: dict[DeviceMesh, list[int]] = {}
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                axes = self._axes.setdefault(tensor.device_mesh, [])
                axes += [axis for axis in _split_axes(tensor) if axis not in axes]

    def norm(self, parts: Sequence[float], p: float) -> float:
        """Give the norm of all tensors together, as one vector, of the norms of their parts."""
        found = [n for n, t in zip(parts, self._tensors, strict=True) if not isinstance(t, DTensor)]
        for mesh, axes in self._axes.items():
            own = [n * c ** (-1.0 / p) for n, c in self._on(mesh, parts)]
            found += _joined(mesh, axes, [joint_norm(own, p)], lambda row: joint_norm(row, p))
        return joint_norm(found, p)

    def counts(self, parts: Sequence[int]) -> list[int]:
        """Add up a count of each tensor over its parts."""
        found = list(parts)
        for mesh, axes in self._axes.items():
            where = [i for i, t in enumerate(self._tensors) if _is_on(t, mesh)]
            own = [n / c for n, c in self._on(mesh, parts)]
            for index, total in zip(where, _joined(mesh, axes, own, sum), strict=True):
                found[index] = round(total)
        return found

    def _on(self, mesh: DeviceMesh, values: Sequence[float]) -> Iterator[tuple[float, int]]:
        """Pair the values of one mesh with how often each will be seen along its axes."""
        for value, tensor in zip(values, self._tensors, strict=True):
            if isinstance(tensor, DTensor) and _is_on(tensor, mesh):
                copies = 1
                for axis in self._axes[mesh]:
                    copies *= 1 if axis in _split_axes(tensor) else mesh.size(axis)
                yield value, copies


def _is_on(tensor: Tensor, mesh: DeviceMesh) -> bool:
    return isinstance(tensor, DTensor) and tensor.device_mesh == mesh


def _split_axes(tensor: DTensor) -> list[int]:
    return [axis for axis, p in enumerate(tensor.placements) if split_dim(p) is not None]


def _joined(
    mesh: DeviceMesh,
    axes: Sequence[int],
    values: Sequence[float],
    join: Callable[[Sequence[float]], float],
) -> list[float]:
    """Join each value with those of the other ranks, along one axis after the other."""
    if mesh.get_coordinate() is None:
        return [0.0] * len(values)
    found = list(values)
    for axis in axes:
        own = torch.tensor(found, dtype=torch.float64, device=mesh.device_type)
        rows = [torch.empty_like(own) for _ in range(mesh.size(axis))]
        dist.all_gather(rows, own, group=mesh.get_group(axis))
        found = [join(column) for column in torch.stack(rows, dim=1).tolist()]
    return found
