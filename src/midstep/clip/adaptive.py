"""Clipping each unit of a layer against the size of its own weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..gradients import Gradients, combined_norm, tensor_norms
from .checks import check_between, listed
from .rule import (
    Attempt,
    Decision,
    MeasuresLength,
    Stateless,
    Threshold,
    at_step,
    check_threshold,
)

__all__ = ["Adaptive"]

_BLOCK = 2**20  # entries widened to float64 at a time: what a cache holds


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Adaptive(MeasuresLength, Stateless):
    r"""Shrink the gradient of each unit so that it is at most a share of the unit's own weights.

        g_u <- g_u * min(1, clipping * max(||w_u||, eps) / ||g_u||)

    A unit is one output: a row of a matrix, a filter of a convolution, all that has one index in
    dim 0 (torch's layout); a vector or a number is one unit. Made for networks without
    normalization. Weights that are zero count as `eps` long, which almost freezes them, and the
    last layer does better without: name such parameters in `exempt`. Changes the direction. Costs
    a read of weights and gradients in float64, and where it clips a multiplication. On shards one
    more read, a small collective, and one for each axis of a mesh that splits units.

    Attributes:
        clipping: The share, of one update at rate 1; a number, or a function of the number of
            applied updates.
        eps: The least that the norm of a unit's weights counts as.
        exempt: Parameters that are left as they are, such as `model.head.parameters()`.

    Raises:
        ValueError: `clipping` or `eps` is not greater than 0, or `exempt` is a generator that was
            read before.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0], [30.0, 40.0]]))
        >>> weight.grad = torch.tensor([[0.6, 0.8], [0.3, 0.4]])
        >>> gradients = Gradients([weight])
        >>> _ = Adaptive(clipping=0.1).decide(gradients, Attempt(step=0))
        >>> weight.grad  # the first row is at most 0.1 * 5 long, the second 0.1 * 50
        tensor([[0.3000, 0.4000], [0.3000, 0.4000]])

    Reference: Brock, De, Smith & Simonyan 2021, arXiv:2102.06171, section 4 (AGC).
    """

    clipping: Threshold = 0.01
    eps: float = 1e-3
    exempt: Tensor | Iterable[Tensor] = dataclasses.field(default=(), repr=False)
    needs_each: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_threshold("clipping", self.clipping, "Adaptive")
        check_between("eps", self.eps, "Adaptive", 0, why="weights of 0 could never grow otherwise")
        exempt = frozenset(listed(self.exempt, "`Adaptive(exempt=...)`"))
        object.__setattr__(self, "exempt", exempt)

    def decide(self, gradients: Gradients, attempt: Attempt) -> Decision:
        """Shrink each unit whose gradient is greater than its share."""
        clipping = at_step("clipping", self.clipping, attempt.step, "Adaptive")
        before = gradients.norms()
        own, weights = self._unit_norms(gradients, before)
        after = list(before)
        factors: dict[int, Tensor] = {}
        for index, pending in enumerate(gradients.factors):
            largest = clipping * weights[index].clamp_min(self.eps)
            norms = own[index] * abs(pending)
            if bool((norms > largest).any()):
                after[index] = tensor_norms([torch.minimum(norms, largest)])[0]
                factors[index] = torch.where(norms > largest, largest / norms, 1.0)

        def shrink_units(tensors: list[Tensor]) -> None:
            for index, factor in factors.items():
                _multiply_units_(tensors[index], factor)

        if gradients.has_parts:  # others may have shrunk what this rank has not
            norm = gradients.norm()
            gradients.edit_(shrink_units)
            is_clipped, shrunk = gradients.any_and_norm(bool(factors))
        else:
            is_clipped, norm = bool(factors), combined_norm(before, 2.0)
            shrunk = combined_norm(after, 2.0)
            if factors:
                gradients.edit_(shrink_units)
        coefficient = shrunk / norm if is_clipped else 1.0
        return Decision(clipped=is_clipped, coefficient=coefficient, threshold=clipping)

    def _unit_norms(
        self, gradients: Gradients, norms: Sequence[float]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Measure the units of each gradient, and of its weights; none of those left alone."""
        both = []
        for parameter, tensor, norm in zip(
            gradients.parameters, gradients.tensors, norms, strict=True
        ):
            if parameter in self.exempt or norm == 0.0:
                both.append(torch.zeros(2, 0, dtype=torch.float64, device=tensor.device))
            else:
                weights = _weights(parameter)
                both.append(torch.stack([_unit_norms(tensor), _unit_norms(weights)]))
        whole = gradients.whole_units(both)
        return [norms[0] for norms in whole], [norms[1] for norms in whole]


def _weights(parameter: Tensor) -> Tensor:
    """The weights that a gradient's entries belong to: all, or the rows a sparse one stores."""
    weights, grad = parameter.detach(), parameter.grad
    if grad is not None and grad.layout is torch.sparse_coo:
        if grad.sparse_dim() != 1:
            raise TypeError(
                f"`Adaptive`: a gradient of shape {list(grad.shape)} is sparse in "
                f"{grad.sparse_dim()} dims, so its rows are not whole. Use a dense one, or name "
                "the parameter in `exempt`."
            )
        return weights[grad.indices()[0]]
    to_local = getattr(weights, "to_local", None)  # of a DTensor: what lies here
    return weights if to_local is None else to_local()


@torch.no_grad()
def _unit_norms(tensor: Tensor) -> Tensor:
    """The norm of each unit, at any magnitude. Shape [units] or [1], float64."""
    if tensor.ndim <= 1:
        return torch.tensor(tensor_norms([tensor]), dtype=torch.float64, device=tensor.device)
    if tensor.numel() == 0:
        return torch.zeros(len(tensor), dtype=torch.float64, device=tensor.device)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    parts = []
    for units in _unit_blocks(tensor):
        entries = units.to(wide).abs().flatten(1)
        largest = entries.amax(dim=1, keepdim=True)
        entries.div_(largest.where(largest > 0, 1.0))  # a copy, so it may be changed
        parts.append(largest.squeeze(1) * entries.square_().sum(dim=1).sqrt())
    return torch.cat(parts)


def _multiply_units_(tensor: Tensor, factors: Tensor) -> None:
    if tensor.ndim <= 1:
        tensor.mul_(factors.view([]))
        return
    blocks = _unit_blocks(tensor)
    for units, own in zip(blocks, torch.split(factors, len(blocks[0])), strict=True):
        units.mul_(own.view(-1, *[1] * (tensor.ndim - 1)))


def _unit_blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    size = max(1, _BLOCK // max(1, tensor[0].numel()))
    return torch.split(tensor, size)
