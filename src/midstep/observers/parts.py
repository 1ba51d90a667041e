"""Parts: numbers of tensors of which other ranks may hold shares, made whole by one sum."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .measures import wide
from .observer import Reading, Subject

__all__ = ["Parts", "refuse_mixed_owners"]


class Parts:
    """What of every parameter lies on this rank, and how numbers of it make the whole.

    Args:
        subject: Whose parameters.
    """

    def __init__(self, subject: Subject) -> None:
        self._sharing = None if subject.ranks is None else subject.ranks.sharing
        self.is_split = self._sharing is not None and any(
            self._sharing.lies_in_parts(p) for p in subject.parameters
        )
        self.size = 1 if subject.ranks is None else subject.ranks.world.size
        self.rank = 0 if subject.ranks is None else subject.ranks.world.rank

    def local(self, tensor: Tensor) -> Tensor:
        """Give what of a tensor lies here, in the same memory."""
        return tensor if self._sharing is None else self._sharing.local_part(tensor)

    def share(self, parameter: Tensor) -> float:
        """Give what a sum over the numbers here counts for: other ranks may hold the same."""
        if not self.is_split:
            return 1.0
        assert self._sharing is not None
        return 1.0 / self._sharing.replicas(parameter)

    def reading(
        self,
        columns: Sequence[tuple[Sequence[float] | Tensor, Sequence[Tensor]]],
        fields: Callable[[list[Sequence[float]]], Mapping[str, Any]],
    ) -> Reading:
        """Make a reading of sums, one a parameter in each column.

        Args:
            columns: Sums over what lies here, such as squares, and of which parameters.
            fields: Makes the fields of the columns of whole sums.
        """
        shared = [self._shared(sums, parameters) for sums, parameters in columns]
        device = next((c.device for c in shared if isinstance(c, Tensor)), None)
        numbers: Sequence[float] | Tensor
        if device is None:
            numbers = [x for column in shared for x in column]
        else:
            numbers = torch.cat([_on(column, device) for column in shared])
        lengths = [len(parameters) for _, parameters in columns]

        def split(whole: Sequence[float]) -> Mapping[str, Any]:
            ends = list(itertools.accumulate(lengths))
            return fields([whole[e - n : e] for e, n in zip(ends, lengths, strict=True)])

        return Reading(numbers, split, is_part=self.is_split)

    def _shared(
        self, sums: Sequence[float] | Tensor, parameters: Sequence[Tensor]
    ) -> Sequence[float] | Tensor:
        if not self.is_split:
            return sums
        shares = [self.share(p) for p in parameters]
        if isinstance(sums, Tensor):
            return sums * _on(shares, sums.device)
        return [x * share for x, share in zip(sums, shares, strict=True)]


def refuse_mixed_owners(subject: Subject, name: str) -> None:
    """Refuse ranks that step different parameters, of which no position names one tensor.

    Raises:
        NotImplementedError: They do.
    """
    if subject.ranks is None:
        return
    sharing = subject.ranks.sharing
    if sharing.has_own or not sharing.is_aligned:
        raise NotImplementedError(
            f"`{name}` on ranks that step parameters of their own, such as experts: numbers by "
            "tensor would mix different tensors of one name. Leave this observer out."
        )


def _on(column: Sequence[float] | Tensor, device: torch.device) -> Tensor:
    if isinstance(column, Tensor):
        return column.to(device)
    return torch.tensor(column, dtype=wide(device)).to(device, non_blocking=True)
