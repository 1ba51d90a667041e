"""Sharing: what of a gradient lies on this rank, and how its parts make the whole."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from .parallel import Parallel
from .world import World, largest

__all__ = ["Sharing"]


class Sharing:
    """Makes norms of the whole model out of what lies on each rank.

    Args:
        world: The ranks.
        parallel: How they share the model.
        names: Of the parameters, in the optimizer's order.
    """

    def __init__(self, world: World, parallel: Parallel, names: Sequence[str]) -> None:
        self.world = world
        self.parallel = parallel
        digest = hashlib.sha256("\n".join(names).encode()).digest()
        rows = world.gather([float(int.from_bytes(digest[:6], "big"))])
        #: Whether every rank steps the same list of parameters, so that positions agree.
        self.is_aligned = len({row[0] for row in rows}) == 1

    def replicas(self, parameter: Tensor) -> int:
        """On how many ranks the same numbers of a parameter's gradient lie."""
        if self.parallel.is_own(parameter):
            return 1
        if not isinstance(parameter, DTensor):
            return self.world.size
        mesh, size = parameter.device_mesh, 1
        for axis, placement in enumerate(parameter.placements):
            if placement.is_replicate():
                size *= mesh.size(axis)
        # Where all ranks step the same list, a mesh that spans some of them has twins elsewhere.
        return size * (self.world.size // mesh.size()) if self.is_aligned else size

    def own_factor(self, parameter: Tensor) -> float:
        """What a parameter that is never averaged is multiplied by: its seed allowed for it."""
        return 1.0 / self.parallel.seed_factor if self.parallel.is_own(parameter) else 1.0

    def require_aligned(self) -> None:
        """Refuse norms by tensor where positions mean different parameters on different ranks.

        Raises:
            NotImplementedError: Ranks step different lists of parameters.
        """
        if not self.is_aligned:
            raise NotImplementedError(
                "Norms by tensor or by group on ranks that step different parameters: a position "
                "does not name the same tensor everywhere. Clip by global norm, or give every rank "
                "the same list."
            )

    def local_gradient(self, parameter: Tensor) -> Tensor:
        """Give the part of a gradient that lies here; partial sums are added up first."""
        grad = parameter.grad
        assert grad is not None
        if not isinstance(grad, DTensor):
            return grad
        if any(placement.is_partial() for placement in grad.placements):
            assert isinstance(parameter, DTensor)
            parameter.grad = grad = grad.redistribute(placements=parameter.placements)
        local = grad.to_local()
        if isinstance(local, AsyncCollectiveTensor):
            waited = local.wait()
            assert isinstance(waited, Tensor)
            return waited
        return local

    def combined(
        self, parts: Sequence[float], p: float, ride: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """Make norms of the whole out of norms of the parts, in one collective.

        Args:
            parts: Norms of what lies here, each already of distinct numbers only.
            p: Order.
            ride: Numbers to sum along the way.

        Returns:
            The norms of the whole, and the sums.
        """
        if p in (1.0, 2.0):
            sums = self.world.sum([*(n**p for n in parts), *ride])
            count = len(parts)
            return [n ** (1.0 / p) for n in sums[:count]], sums[count:]
        rows = self.world.gather([*parts, *ride])
        count = len(parts)
        sums = [sum(column) for column in zip(*(row[count:] for row in rows), strict=True)]
        columns = list(zip(*(row[:count] for row in rows), strict=True))
        if math.isinf(p):
            return largest([row[:count] for row in rows]), sums
        return [_power_mean(column, p) for column in columns], sums


def _power_mean(parts: Sequence[float], p: float) -> float:
    top = largest([[part] for part in parts])[0]
    if top == 0.0 or not math.isfinite(top):
        return top
    total: float = top * sum((part / top) ** p for part in parts) ** (1.0 / p)
    return total
