"""Gradients whose numbers lie on several ranks: norms of the whole, made of what lies on each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .memory import editable
from .norms import combined_norm, unread_norms
from .pending import Gradients

if TYPE_CHECKING:
    from ..ranks.sharing import Sharing

__all__ = ["SharedGradients"]


class SharedGradients(Gradients):
    """The gradients of one optimizer, of which this rank holds copies, shards or its own.

    Everything is as on one rank, and the same on every rank; `tensors` are what lies here. A norm
    that was not measured ahead is one small collective, so all ranks must ask alike.

    Args:
        parameters: Those without a gradient are left out, repeated ones are taken once.
        sharing: How the parts make the whole.
    """

    __slots__ = ("_listed", "_sharing", "_totals", "_wholes")

    def __init__(self, parameters: Iterable[Tensor], sharing: Sharing) -> None:
        given = list(dict.fromkeys(parameters))

        def part_of(parameter: Tensor) -> Tensor:
            # What lies here of a DTensor was made by its own collectives.
            is_split = sharing.is_split(parameter)
            return sharing.local_gradient(parameter) if is_split else editable(parameter)

        super().__init__(given, part_of=part_of)
        self._listed = len(given)
        self._sharing = sharing
        # Of the whole of what lies in `.grad`, by order p.
        self._totals: dict[float, float] = {}
        self._wholes: dict[float, list[float]] = {}

    def _each_measured(self, p: float) -> list[float]:
        if p not in self._wholes:
            self.measure(p, each=True)
        return self._wholes[p]

    def norm(self, p: float = 2.0) -> float:
        """Give the true norm of all gradients of the whole model together, as one vector."""
        if self._each is None:
            if p not in self._totals:
                self.measure(p, each=False)
            return self._totals[p] * abs(self._factor)
        if not self._sharing.has_own:
            return combined_norm(self.norms(p), p)
        # Other ranks have parameters, and factors, that this one knows nothing of.
        parts = [n * abs(c) for n, c in zip(self._parts(p), self.factors, strict=True)]
        return self._sharing.total(combined_norm(parts, p), p, ())[0]

    def measure(self, p: float, *, each: bool, ride: Sequence[float] = ()) -> list[float]:
        """Measure ahead, in one small collective.

        Args:
            p: Order of the norm.
            each: Whether the norm of each tensor will be asked for, or that of all together only.
            ride: Numbers to sum over the ranks along the way.

        Returns:
            The sums.
        """
        part = self._part(p)
        if not each:
            self._totals[p], sums = self._sharing.total(part, p, ride)
            return sums
        slots = [0.0] * self._listed
        for position, norm in zip(self.positions, self._parts(p), strict=True):
            slots[position] = norm
        owners = dict(zip(self.positions, self.parameters, strict=True))
        wholes, self._totals[p], sums = self._sharing.each(part, slots, owners, p, ride)
        self._wholes[p] = [wholes[position] for position in self.positions]
        return sums

    def unread_norms(self, p: float, ride: Tensor) -> tuple[Tensor, Tensor]:
        """Measure the norm of each gradient whole, and read none: one small collective.

        All ranks get the same numbers, to the last bit. Of order inf only where each holds copies.
        """
        own = unread_norms(self.tensors, p)
        if math.isinf(p):  # of copies, which have the same largest entry
            self._sharing.world.add_up_(ride)
            return own, ride
        shares = [1.0 / self._sharing.replicas(parameter) for parameter in self.parameters]
        slots = torch.zeros(self._listed, dtype=own.dtype, device=own.device)
        positions = torch.tensor(self.positions).to(own.device, non_blocking=True)
        factors = torch.tensor(shares, dtype=own.dtype).to(own.device, non_blocking=True)
        slots.index_copy_(0, positions, own.square() * factors)
        numbers = torch.cat([slots, ride])
        self._sharing.world.add_up_(numbers)
        return numbers[positions].sqrt(), numbers[self._listed :]

    @property
    def has_parts(self) -> bool:
        """Whether this rank knows only a part of them, so that others may have to be asked."""
        return self._sharing.has_parts

    def whole_units(self, norms: Sequence[Tensor]) -> list[Tensor]:
        """Make the norms of whole units out of those of what lies here.

        One small gather for each axis of a mesh along which units are split.
        """
        return self._sharing.whole_units(self.parameters, norms)

    def any_and_norm(self, flag: bool) -> tuple[bool, float]:
        """Say whether any rank says so, and measure the L2 norm anew: one small collective."""
        (num,) = self.measure(2.0, each=True, ride=[float(flag)])
        return num > 0, self.norm()

    def _parts(self, p: float) -> list[float]:
        """Norms of what lies here, each share of a number that lies on several ranks counted."""
        return [
            n * _share(self._sharing.replicas(parameter), p)
            for n, parameter in zip(self._measured(p).each(), self.parameters, strict=True)
        ]

    def _part(self, p: float) -> float:
        """The same of all together; where they lie on equally many ranks, without that of each."""
        replicas = {self._sharing.replicas(parameter) for parameter in self.parameters}
        if len(replicas) == 1:
            return self._measured(p).total() * _share(replicas.pop(), p)
        return combined_norm(self._parts(p), p)

    def edit_(self, change: Callable[[list[Tensor]], object]) -> None:
        """Change what lies here in place; what was measured is forgotten."""
        super().edit_(change)
        self._totals.clear()
        self._wholes.clear()

    def hand_over_(self) -> None:
        """Note that somebody else, such as a fused optimizer, applies the pending factor."""
        if self._factor != 1.0 or self._each is not None:
            self._totals.clear()
            self._wholes.clear()
        super().hand_over_()


def _share(num_ranks: int, p: float) -> float:
    """What a norm counts for that so many ranks have alike; of order inf, all of it."""
    return float(num_ranks ** (-1.0 / p))
