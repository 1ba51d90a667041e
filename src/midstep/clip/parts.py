"""Tensors that may be split over ranks, for the functions that know of no updater.

What is split says so itself, as a DTensor. Of one process alone nothing of this is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..gradients import Gradients, Norms, editable, num_nonfinite, values_of

if TYPE_CHECKING:
    from ..ranks.meshes import Meshes

__all__ = ["Parts", "gradients_of", "parts_of"]


class Parts:
    """What lies here of some tensors, and what it makes with the parts on other ranks.

    Args:
        wholes: The tensors, of which some may be DTensors.
        tensors: What of each lies here.
    """

    def __init__(self, wholes: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self._meshes: Meshes | None = None
        if any(map(_is_split, wholes)):
            from ..ranks.meshes import Meshes

            self._meshes = Meshes(wholes)

    def norm(self, order: float) -> float:
        """Measure the joint norm; one small collective for each axis of each mesh.

        Raises:
            NotImplementedError: An order that is no norm, of tensors that are split.
        """
        if order > 0:
            norms = Norms(self.tensors, order)
            return norms.total() if self._meshes is None else self._meshes.norm(norms.each(), order)
        if self._meshes is not None:
            raise NotImplementedError(
                f"A norm of order {order} of tensors that are split over ranks: what the parts say "
                "does not make that of the whole. Take an order greater than 0."
            )
        return _norm_of_no_norm(self.tensors, order)

    def num_nonfinite(self) -> list[int]:
        """Count the inf and nan entries of each whole tensor."""
        counts = num_nonfinite(self.tensors)
        return counts if self._meshes is None else self._meshes.counts(counts)


def gradients_of(parameters: Sequence[Tensor]) -> Gradients:
    """Take the gradients of some parameters, of split ones what lies here."""
    return Gradients(parameters, part_of=_editable_part)


def parts_of(tensors: Sequence[Tensor]) -> Parts:
    """Take some tensors, of split ones what lies here."""
    return Parts(tensors, [_part(tensor) for tensor in tensors])


def _editable_part(parameter: Tensor) -> Tensor:
    if not _is_split(parameter.grad):
        return editable(parameter)
    from ..ranks.locals import local_gradient

    return local_gradient(parameter)


def _part(tensor: Tensor) -> Tensor:
    if not _is_split(tensor):
        return values_of(tensor)
    from ..ranks.meshes import part_of

    return part_of(tensor)


def _is_split(tensor: Tensor | None) -> bool:
    # Whoever made one has imported it; to ask by the class would import it for everyone.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@torch.no_grad()
def _norm_of_no_norm(tensors: Sequence[Tensor], order: float) -> float:
    """Orders that are no norms, for torch's sake: of the vector of each tensor's own."""
    each = [torch.linalg.vector_norm(t.abs().double(), order).item() for t in tensors if t.numel()]
    if not each:
        return 0.0
    joint: Tensor = torch.linalg.vector_norm(torch.tensor(each, dtype=torch.float64), order)
    return joint.item()
