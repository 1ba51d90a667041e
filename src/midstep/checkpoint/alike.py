"""Alike: which tensors are the same on every rank that has them, and so need be stored once only.

Weights and their optimizer state mostly are. Buffers mostly are not (each rank's BatchNorm has seen
other rows), nor are parameters that are a rank's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..ranks import Ranks
from ..ranks.locals import split_dim
from .tensors import chunk_of, local_of

__all__ = ["Marker", "that_differ"]

# How many are multiplied at once: what fits a cache, or keeps an accelerator busy.
_AT_ONCE_ON_HOST = 1 << 16
_AT_ONCE_ELSEWHERE = 1 << 22


def that_differ(tensors: Mapping[str, Tensor], ranks: Ranks) -> set[str]:
    """Name the tensors of this rank of which another rank holds another version.

    Costs a read of what more than one rank holds, and one small collective; two where any differ.
    """
    places = {key: _place(tensor, ranks.world.size) for key, tensor in tensors.items()}
    marker = Marker()
    marks = {
        f"{place} {key}": marker.mark(tensors[key])
        for key, place in places.items()
        if place is not None
    }
    brief = hashlib.sha256(repr(sorted(marks.items())).encode()).hexdigest()
    with ranks.failing():
        if len(set(ranks.world.gather_objects(brief))) == 1:
            return set()
        everyone: list[dict[str, str]] = ranks.world.gather_objects(marks)
    versions: dict[str, set[str]] = {}
    for theirs in everyone:
        for where, mark in theirs.items():
            versions.setdefault(where, set()).add(mark)
    return {
        key
        for key, place in places.items()
        if place is not None and len(versions[f"{place} {key}"]) > 1
    }


def _place(tensor: Tensor, num_ranks: int) -> str | None:
    """Say which part of the whole lies here; None where no other rank can have the same part."""
    if not isinstance(tensor, DTensor):
        return "whole"
    mesh = tensor.device_mesh
    if mesh.size() == num_ranks and all(split_dim(p) is not None for p in tensor.placements):
        return None
    return str(chunk_of(tensor))


class Marker:
    """Gives tensors marks, by which equal ones are known without sending them."""

    def __init__(self) -> None:
        self._factors: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def mark(self, tensor: Tensor) -> str:
        """Give a short text that differs when any bit of what lies here does, its shape or dtype.

        One read; on an accelerator one host sync. A sum of halfwords, each times a random number of
        its own: unlike a plain sum it sees an exchange of two, and unlike a digest it runs where
        the tensor is.

        Reference: Lemire & Kaser 2014, arXiv:1202.4961 (multilinear hashing).
        """
        local = local_of(tensor)
        if local.is_complex():
            local = torch.view_as_real(local.resolve_conj())
        octets = local.contiguous().view(-1).view(torch.uint8)
        rest = octets.numel() % 4
        if rest or octets.data_ptr() % 4:  # halfwords need an address that 4 divides
            octets = torch.nn.functional.pad(octets, (0, -rest % 4))
        halfwords, factors = octets.view(torch.int32), self._factors_on(octets.device)
        total = torch.zeros((), dtype=torch.int64, device=octets.device)
        for start in range(0, halfwords.numel(), factors.numel()):
            piece = halfwords[start : start + factors.numel()]
            total = (total ^ (total >> 31)) * 6364136223846793005
            total = total + (piece * factors[: piece.numel()]).sum()
        return f"{tensor.dtype} {list(tensor.shape)} {list(local.shape)} {total.item()}"

    def _factors_on(self, device: torch.device) -> Tensor:
        if device not in self._factors:
            count = _AT_ONCE_ON_HOST if device.type == "cpu" else _AT_ONCE_ELSEWHERE
            generator = torch.Generator().manual_seed(0)
            found = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
            self._factors[device] = found.to(device)
        return self._factors[device]
