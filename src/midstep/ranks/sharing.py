"""Sharing: what of a gradient lies on this rank, and how its parts make the whole."""

from __future__ import annotations

import collections
import hashlib
import math
from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from .locals import local_gradient
from .parallel import Parallel
from .world import World, largest

__all__ = ["Sharing"]


class Sharing:
    """Makes norms of the whole model out of what lies on each rank.

    Args:
        world: The ranks.
        parallel: How they share the model.
        names: Of the parameters, in the optimizer's order.
        parameters: What the optimizer steps.

    Attributes:
        is_aligned: Whether every rank steps the same list of parameters, so that positions agree.
        has_own: Whether any rank steps a parameter that is its own.
    """

    def __init__(
        self, world: World, parallel: Parallel, names: Sequence[str], parameters: Sequence[Tensor]
    ) -> None:
        self.world = world
        self.parallel = parallel
        digest = hashlib.sha256("\n".join(names).encode()).digest()
        has_own = any(parallel.is_own(p) for p in parameters)
        rows = world.gather([float(int.from_bytes(digest[:6], "big")), float(has_own)])
        self.is_aligned = len({row[0] for row in rows}) == 1
        self.has_own = any(row[1] for row in rows)
        self._num_holders: dict[Tensor, int] = {}
        if not self.is_aligned:
            everyone = world.gather_objects(list(names))
            holders = collections.Counter(name for theirs in everyone for name in set(theirs))
            self._num_holders = {p: holders[n] for n, p in zip(names, parameters, strict=True)}

    def replicas(self, parameter: Tensor) -> int:
        """On how many ranks the same numbers of a parameter's gradient lie."""
        is_own = self.parallel.is_own(parameter)
        num_holders = 1 if is_own else self._num_holders.get(parameter, self.world.size)
        if not isinstance(parameter, DTensor):
            return num_holders
        mesh, size = parameter.device_mesh, 1
        for axis, placement in enumerate(parameter.placements):
            if placement.is_replicate():
                size *= mesh.size(axis)
        # A parameter on a mesh of some of the ranks that step it has twins on the others.
        return size * max(1, num_holders // mesh.size())

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
        return local_gradient(parameter)

    def combined(
        self, parts: Sequence[float], p: float, ride: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """Make norms of the whole out of norms of the parts, in one collective.

        A second one where powers leave the range of float64, beyond 1e154 or below 1e-154 for p = 2
        and where a norm is not finite.

        Args:
            parts: Norms of what lies here, each already of distinct numbers only.
            p: Order.
            ride: Numbers to sum along the way.

        Returns:
            The norms of the whole, and the sums.
        """
        count = len(parts)
        if p in (1.0, 2.0):
            # Whether a power vanished travels along, or a true 0 would look like one that did.
            powers = [_power(n, p) for n in parts]
            lost = float(any(n and power < _SAFE for n, power in zip(parts, powers, strict=True)))
            sums = self.world.sum([*powers, lost, *ride])
            if all(total < math.inf for total in sums[:count]) and not sums[count]:
                return [total ** (1.0 / p) for total in sums[:count]], sums[count + 1 :]
            wholes, _ = self._gathered(parts, p, ())
            return wholes, sums[count + 1 :]
        return self._gathered(parts, p, ride)

    def _gathered(
        self, parts: Sequence[float], p: float, ride: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        count = len(parts)
        rows = self.world.gather([*parts, *ride])
        sums = [sum(column) for column in zip(*(row[count:] for row in rows), strict=True)]
        if math.isinf(p):
            return largest([row[:count] for row in rows]), sums
        columns = zip(*(row[:count] for row in rows), strict=True)
        return [_power_mean(column, p) for column in columns], sums


# A power below loses digits; what such a part adds to a norm that matters is nothing.
_SAFE = 1e-290


def _power(norm: float, p: float) -> float:
    try:
        return norm**p
    except OverflowError:
        return math.inf


def _power_mean(parts: Sequence[float], p: float) -> float:
    top = largest([[part] for part in parts])[0]
    if top == 0.0 or not math.isfinite(top):
        return top
    total: float = top * sum((part / top) ** p for part in parts) ** (1.0 / p)
    return total
