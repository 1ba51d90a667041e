"""Sharing: what of a gradient lies on this rank, and how its parts make the whole."""

from __future__ import annotations

import collections
import hashlib
import math
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from .joint import joint_norm
from .locals import local_gradient, local_part
from .parallel import Parallel
from .units import whole_units
from .world import World

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
        has_parts: Whether any steps one of which only a part lies here, or that is its own.
    """

    def __init__(
        self, world: World, parallel: Parallel, names: Sequence[str], parameters: Sequence[Tensor]
    ) -> None:
        self.world = world
        self.parallel = parallel
        digest = hashlib.sha256("\n".join(names).encode()).digest()
        has_own = any(parallel.is_own(p) for p in parameters)
        has_parts = has_own or any(isinstance(p, DTensor) for p in parameters)
        said = [float(int.from_bytes(digest[:6], "big")), float(has_own), float(has_parts)]
        rows = world.gather(said)
        self.is_aligned = len({row[0] for row in rows}) == 1
        self.has_own = any(row[1] for row in rows)
        self.has_parts = any(row[2] for row in rows)
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

    def is_split(self, parameter: Tensor) -> bool:
        """Whether a gradient is a DTensor, of which only a part may lie here."""
        return isinstance(parameter.grad, DTensor)

    def lies_in_parts(self, tensor: Tensor) -> bool:
        """Whether a tensor is a DTensor, of which only a part may lie here."""
        return isinstance(tensor, DTensor)

    def local_part(self, tensor: Tensor) -> Tensor:
        """Give what of a tensor lies here, in the same memory."""
        return local_part(tensor)

    def local_gradient(self, parameter: Tensor) -> Tensor:
        """Give the part of a gradient that lies here; partial sums are added up first."""
        return local_gradient(parameter)

    def whole_units(self, parameters: Sequence[Tensor], norms: Sequence[Tensor]) -> list[Tensor]:
        """Make the norms of whole units out of those of what lies here."""
        return whole_units(parameters, norms)

    def members(self, parameter: Tensor) -> list[int]:
        """Name the ranks among which a parameter's gradient lies, whole or in parts."""
        if not self.parallel.is_own(parameter):
            return list(range(self.world.size))
        if not isinstance(parameter, DTensor):
            return [self.world.rank]
        found: list[int] = parameter.device_mesh.mesh.flatten().tolist()
        return found

    def total(self, part: float, p: float, ride: Sequence[float]) -> tuple[float, list[float]]:
        """Make the norm of the whole model out of the norms of its parts, in one collective.

        A second one where the power of a norm leaves the range of float64 (for p = 2 a norm beyond
        1e154 or below 1e-145) and where a norm is not finite.

        Args:
            part: Norm of what lies here, of distinct numbers only.
            p: Order.
            ride: Numbers to sum along the way.

        Returns:
            The norm of the whole, and the sums.
        """
        (whole,), sums = self._combined([part], p, ride)
        return whole, sums

    def each(
        self,
        part: float,
        parts: Sequence[float],
        owners: Mapping[int, Tensor],
        p: float,
        ride: Sequence[float],
    ) -> tuple[list[float], float, list[float]]:
        """Make the norm of each whole gradient out of the norms of its parts, as `total` does.

        Args:
            part: Norm of what lies here, all together.
            parts: Norms of what lies here, by position in the optimizer's list.
            owners: The parameter at each position where this rank has a gradient.
            p: Order.
            ride: Numbers to sum along the way.

        Returns:
            The norm of each whole, that of all together, and the sums.
        """
        self._require_aligned()
        if not self.has_own:
            # Beside them, and first, as `total` sends it: the same bits, whoever asks for each.
            (whole, *wholes), sums = self._combined([part, *parts], p, ride)
            return wholes, whole, sums
        # A position holds one tensor of each owner, so whose part it is must be known.
        count = len(parts)
        rows = self.world.gather([*parts, *ride])
        sums = [sum(column) for column in zip(*(row[count:] for row in rows), strict=True)]
        holders = {i: self.members(parameter) for i, parameter in owners.items()}
        wholes = [
            joint_norm([rows[rank][i] for rank in holders.get(i, ())], p) for i in range(count)
        ]
        return wholes, joint_norm([part for row in rows for part in row[:count]], p), sums

    def _require_aligned(self) -> None:
        if not self.is_aligned:
            raise NotImplementedError(
                "Norms by tensor or by group on ranks that step different parameters: a position "
                "does not name the same tensor everywhere. Clip by global norm, or give every rank "
                "the same list."
            )

    def _combined(
        self, parts: Sequence[float], p: float, ride: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        count = len(parts)
        known: list[float] | None = None
        if p in (1.0, 2.0):
            powers = [_power(n, p) for n in parts]
            is_lost = any(n and power < _SAFE for n, power in zip(parts, powers, strict=True))
            sums = self.world.sum([*powers, float(is_lost), *ride])
            known = sums[count + 1 :]
            if all(total < math.inf for total in sums[:count]) and not sums[count]:
                return [total ** (1.0 / p) for total in sums[:count]], known
        rows = self.world.gather([*parts, *(ride if known is None else ())])
        columns = zip(*(row[:count] for row in rows), strict=True)
        wholes = [joint_norm(column, p) for column in columns]
        if known is None:
            known = [sum(column) for column in zip(*(row[count:] for row in rows), strict=True)]
        return wholes, known


# Below, a power has lost digits.
_SAFE = 1e-290


def _power(norm: float, p: float) -> float:
    try:
        return math.pow(norm, p)
    except OverflowError:
        return math.inf
