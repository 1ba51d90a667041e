"""Losses: what lies between a scalar and the reductions it was made of, read from its graph.

The graph says which reductions a loss has, what each is a mean over, and which constants it was
multiplied by since, however the functions were imported. What each reduction counts for in the end
is not computed but measured: it is the gradient that arrives there during the backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..events import Factor, Term
from ..written import written

__all__ = ["FAILURES", "Leaf", "find_leaves", "number"]

# What a look into a graph may raise: buffers freed or changed in place, names of other versions.
FAILURES = (RuntimeError, AttributeError, TypeError, ValueError, IndexError, NotImplementedError)

MAX_NODES = 200  # of the scalar part of a graph; a loss with more is not looked into
MAX_LEAVES = 16
MAX_DEPTH = 6  # how far below a sum its mask is looked for

_MEAN, _SUM = 1, 2  # torch's numbers of a reduction

_BY_REDUCTION = frozenset(
    f"{name}Backward0"
    for name in (
        *("MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy"),
        *("BinaryCrossEntropyWithLogits", "SoftMarginLoss", "MultiMarginLoss"),
        *("MultilabelMarginLoss", "NllLoss", "NllLoss2D"),
    )
)
_LINEAR = (
    *("Add", "Sub", "Neg", "Div", "Mul", "View", "Squeeze", "Unsqueeze", "ToCopy", "Clone"),
    *("Alias", "Expand", "Reshape", "UnsafeView", "Select", "Stack", "Cat", "Unbind"),
)


@written
class Leaf:
    """A reduction, and the node whose incoming gradient says what it counts for."""

    node: Any
    term: Term


def find_leaves(roots: list[Tensor]) -> list[Leaf]:
    """Return the reductions under a scalar loss, in a fixed order.

    Reads a few attributes a node, and the masks; runs no backward. Empty where the loss is not a
    scalar, or has too many parts.

    Args:
        roots: What backward is called on.
    """
    leaves: list[Leaf] = []
    stack: list[tuple[Any, tuple[Factor, ...], bool]] = [
        (root.grad_fn, (), True) for root in reversed(roots) if root.numel() == 1
    ]
    num_nodes = 0
    while stack:
        node, factors, is_linear = stack.pop()
        num_nodes += 1
        if node is None or num_nodes > MAX_NODES or len(leaves) > MAX_LEAVES:
            return []
        name = _base(node)
        if name == "torch::autograd::AccumulateGrad":
            continue
        below = list(_below(node))
        if _is_leaf(name, below):
            leaves.append(Leaf(node, _term(node, name, factors, is_linear, below)))
            continue
        factor = _factor(node, name)
        if factor is not None:
            factors = (*factors, factor)
        elif name.startswith(("Div", "Mul")) or not name.startswith(_LINEAR):
            is_linear = False
        stack.extend((child, factors, is_linear) for child in reversed(below))
    return leaves


def number(value: Any) -> float:
    """Return a Python number; of a tensor, this waits for its device.

    Args:
        value: A number or a tensor; nan is returned for one that is not a single plain element.
    """
    if isinstance(value, Tensor):
        # A part of a distributed tensor is not its value, and asking for it would be a collective.
        if value.numel() != 1 or hasattr(value, "to_local"):
            return math.nan
        return float(value.detach())
    return float(value)


def _base(node: Any) -> str:
    return str(node.name())


def _below(node: Any) -> Iterator[Any]:
    return (child for child, _ in node.next_functions if child is not None)


def _numel(node: Any) -> int:
    """Elements of what a node put out in forward, -1 if unknown."""
    metadata = getattr(node, "_input_metadata", None)
    return math.prod(metadata[0].shape) if metadata else -1


def _is_leaf(name: str, below: list[Any]) -> bool:
    if name in _BY_REDUCTION:
        return True
    is_reduction = name.startswith(("SumBackward", "MeanBackward"))
    if is_reduction and len(below) == 1 and _base(below[0]).startswith(("Stack", "Cat")):
        # The mean or sum of a list of losses.
        return any(_numel(child) != 1 for child in _below(below[0]))
    if not below or name.startswith(("Stack", "Cat")):
        return not below
    return is_reduction or any(
        _numel(child) != 1 for child in below if _base(child) != "torch::autograd::AccumulateGrad"
    )


def _factor(node: Any, name: str) -> Factor | None:
    """The constant that a node multiplies by, or None."""
    is_division = name.startswith("Div")
    if not is_division and not name.startswith("Mul"):
        return None
    other = getattr(node, "_saved_other", None)
    mine = getattr(node, "_saved_self", None)
    if is_division:
        # `_saved_self` is kept when the divisor has a gradient, too.
        if mine is not None or other is None:
            return None
        return Factor(True, 1.0 / value if (value := number(other)) else math.inf)
    if (other is None) == (mine is None):
        return None
    return Factor(False, number(mine if other is None else other))


def _term(
    node: Any, name: str, factors: tuple[Factor, ...], is_linear: bool, below: list[Any]
) -> Term:
    if name in _BY_REDUCTION:
        is_mean = node._saved_reduction == _MEAN  # noqa: SLF001 - autograd's own name
        numel = _numel_of_saved(node)
        count, is_weighted = float(numel), False
        if name.startswith("NllLoss"):
            numel = int(node._saved_target.numel())  # noqa: SLF001
            is_weighted = node._saved_weight is not None  # noqa: SLF001
            count = _targets(node) if not is_mean else number(node._saved_total_weight)  # noqa: SLF001
        compares = name == "NllLossBackward0" and _compares_rows(node)
        return Term(
            name,
            is_mean,
            count,
            numel,
            is_weighted=is_weighted,
            is_linear=is_linear,
            compares_rows=compares,
            factors=factors,
        )
    if name.startswith("MeanBackward"):
        numel = int(node._saved_self_sym_numel)  # noqa: SLF001
        return Term(name, True, float(numel), numel, is_linear=is_linear, factors=factors)
    if name.startswith("SumBackward"):
        numel = math.prod(int(size) for size in node._saved_self_sym_sizes)  # noqa: SLF001
        mask_sum = _mask_sum(below[0], numel) if below else math.nan
        count = float(numel) if math.isnan(mask_sum) else mask_sum
        return Term(
            name, False, count, numel, mask_sum=mask_sum, is_linear=is_linear, factors=factors
        )
    return Term(name, False, math.nan, -1, is_linear=is_linear, factors=factors)


def _numel_of_saved(node: Any) -> int:
    return int(node._saved_self.numel())  # noqa: SLF001


def _compares_rows(node: Any) -> bool:
    """Whether the right answer of row i is column i, of as many columns as rows."""
    logits, target = node._saved_self, node._saved_target  # noqa: SLF001
    if logits.dim() != 2 or logits.shape[0] != logits.shape[1] or logits.shape[0] < 2:
        return False
    return bool(torch.equal(target, torch.arange(len(target), device=target.device)))


def _targets(node: Any) -> float:
    """Targets of a cross entropy that are not ignored, or the sum of their weights."""
    target, weight = node._saved_target, node._saved_weight  # noqa: SLF001
    kept = target[target != node._saved_ignore_index]  # noqa: SLF001
    return float(kept.numel()) if weight is None else float(weight[kept].sum())


def _mask_sum(node: Any, numel: int) -> float:
    """Sum of the mask that a sum was taken under, nan if it has none."""
    for _ in range(MAX_DEPTH):
        name = _base(node)
        if name.startswith("Mul"):
            mask = _constant(node)
            if mask is not None and mask.numel() > 1:
                return _sum_if_mask(mask, _numel(node))
            if mask is None:
                return math.nan
        elif name.startswith("Where"):
            return _sum_if_mask(node._saved_condition, _numel(node))  # noqa: SLF001
        elif name.startswith("MaskedFill"):
            return float(numel) - _sum_if_mask(node._saved_mask, _numel(node))  # noqa: SLF001
        elif name.startswith("NllLoss"):
            return _targets(node)
        elif not name.startswith(_LINEAR):
            return math.nan
        below = list(_below(node))
        if len(below) != 1:
            return math.nan
        node = below[0]
    return math.nan


def _constant(node: Any) -> Tensor | None:
    """The factor of a product that has no gradient; None if both have one."""
    other, mine = getattr(node, "_saved_other", None), getattr(node, "_saved_self", None)
    if (other is None) == (mine is None):
        return None
    value = mine if other is None else other
    return value if isinstance(value, Tensor) else torch.tensor(float(str(value)))


def _sum_if_mask(mask: Tensor, numel: int) -> float:
    """Sum of a mask or of weights, as often as it is broadcast; nan if a value is negative."""
    if numel <= 0 or mask.numel() == 0:
        return math.nan
    mask = mask.detach()
    if mask.dtype != torch.bool and bool((mask < 0).any()):
        return math.nan
    return float(mask.sum()) * numel / mask.numel()
