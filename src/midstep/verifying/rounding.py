"""How far rounding may move a gradient: measured, on the operations that make it.

A kernel's result is the exact result for inputs that differ from its own by little: for a sum of n
products in an arithmetic of unit roundoff u, with rounding errors of either sign, by a share of

    e(n, u) = LAMBDA * sqrt(n) * u

of each input at most, but for a chance of 2 exp(-LAMBDA^2 / 2) (Higham & Mary 2019, theorem 2.4;
the worst case is n u). So the whole batch is run again with every input of every operation of
forward and backward moved, up or down at random: each number by half its share for itself, and by
half of it together with all others of that input, as a rounding of a running sum turns all terms
before it. What that does to the gradient, cancellation and all, is at least what rounding may do to
one computation of it. Two computations, the one by pieces and the one at once, may be twice as far
apart; and the sum over k pieces rounds k times more:

    bound = 2 * max over draws ||g_moved - g|| + k u * sum over pieces ||g_piece||

one such bound for each parameter. n is read from the shapes (what a contraction sums over), u from
the dtype in which the operation runs, so a norm that computes in float32 inside of a float64 model
is given its due.

It is no proof: errors are taken as independent of each other. Held against float64, the error of
float32 gradients was at most 0.13 of what moved inputs did to them, in 1,720 tensors of eight
models (`benchmarks/rounding_bound.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["LAMBDA", "NUM_DRAWS", "Moved", "num_terms", "unit_roundoff"]

LAMBDA = 6.0  # a chance of 3e-8
NUM_DRAWS = 3
_POINTWISE_TERMS = 4  # a function such as exp is right to a few units of the last digit


class Moved:
    """Runs operations on inputs moved by what rounding may.

    Args:
        generator: Decides up or down; no other random stream is touched.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation on moved inputs."""
        if not _rounds(func) or _to_whole_numbers(func, kwargs):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        leaves, form = tree_flatten((args, kwargs))
        floats = [leaf for leaf in leaves if _is_real(leaf)]
        if not floats:
            return func(*args, **kwargs)
        dtypes = {t.dtype for t in floats} | {d for d in leaves if _is_real_dtype(d)}
        step = LAMBDA * math.sqrt(num_terms(func, floats)) * max(map(unit_roundoff, dtypes))
        moved = [
            self._moved(leaf, step) if _is_real(leaf) and id(leaf) not in written else leaf
            for leaf in leaves
        ]
        args, kwargs = tree_unflatten(moved, form)
        return func(*args, **kwargs)

    def _moved(self, tensor: Tensor, step: float) -> Tensor:
        if tensor.is_sparse or _counts(tensor):
            return tensor
        signs = torch.empty(tensor.shape, dtype=tensor.dtype)
        signs.bernoulli_(0.5, generator=self._generator).mul_(step)
        shared = int(torch.randint(2, (), generator=self._generator)) - 1
        return tensor * signs.add_(1 + step * shared).to(tensor.device)


def num_terms(func: Any, tensors: Sequence[Tensor]) -> int:
    """Bound how many numbers one entry of the result is a sum over.

    Args:
        func: The operation.
        tensors: Its inputs.
    """
    if torch.Tag.pointwise in func.tags:
        return _POINTWISE_TERMS
    sizes = [
        math.prod(t.shape) // min(size for size in t.shape if size > 0)
        for t in tensors
        if t.ndim and all(t.shape)
    ]
    longest = [max(t.shape) for t in tensors if t.ndim]
    return max([_POINTWISE_TERMS, *sizes, *longest])


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def _rounds(func: Any) -> bool:
    """Whether an operation computes: neither a view nor a copy, nor a choice among its inputs."""
    if func.is_view or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return func.overloadpacket.__name__ not in _EXACT


def _counts(tensor: Tensor) -> bool:
    """Whether all entries are small whole numbers, as in a mask or the number of an expert.

    They are exact, and so are their products; and they may be compared with other whole numbers.
    """
    largest = unit_roundoff(tensor.dtype) ** -0.5
    return bool(((tensor == tensor.round()) & (tensor.abs() <= largest)).all())


def _to_whole_numbers(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether it cuts numbers down to whole ones, below which a moved input may fall."""
    dtype = kwargs.get("dtype")
    if func.overloadpacket.__name__ != "_to_copy" or dtype is None:
        return False
    return not (dtype.is_floating_point or dtype.is_complex)


# They hand on, choose or compare, and round nothing. Some are differentiated by asking which input
# equals the result, which no moved copy would.
_EXACT = frozenset(
    {
        *("clone", "copy_", "detach", "_unsafe_view", "zero_", "fill_", "cat", "stack", "index"),
        *("gather", "index_select", "embedding", "max_pool2d_with_indices", "sort", "topk"),
        *("max_pool3d_with_indices", "adaptive_max_pool2d", "max", "min", "amax", "amin"),
        *("aminmax", "maximum", "minimum", "median", "nanmedian", "kthvalue", "mode", "cummax"),
        *("cummin", "clamp", "clamp_", "clamp_min", "clamp_max", "unique", "unique_consecutive"),
        *("argmax", "argmin", "argsort", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "new_zeros", "new_empty", "roll"),
        *("new_full", "new_ones", "_local_scalar_dense", "neg", "abs", "sign", "flip", "where"),
        *("masked_fill", "masked_fill_", "relu", "relu_", "threshold_backward", "is_nonzero"),
        *("histc", "bincount", "bucketize", "searchsorted", "remainder", "fmod", "heaviside"),
        *("nonzero", "equal", "round", "floor", "ceil", "trunc", "repeat", "_to_dense"),
    }
)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """What an operation writes to: a moved copy of it would catch the result."""
    arguments = func._schema.arguments  # noqa: SLF001 - nothing else says what is written
    values = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
    found: set[int] = set()
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            found |= {id(leaf) for leaf in tree_leaves(values.get(argument.name))}
    return found


def _is_real(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _is_real_dtype(leaf: object) -> bool:
    return isinstance(leaf, torch.dtype) and leaf.is_floating_point
