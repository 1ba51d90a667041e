"""Random draws: kept from a run of the whole batch, and given row by row to runs of its pieces.

Dropout draws in the order of the forwards, so a batch in pieces gets other masks than the batch at
once. With the same masks for the same rows, what is left of a difference is not the draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import MidstepError

__all__ = ["Kept", "OtherDraws", "Replayed"]


class OtherDraws(MidstepError, RuntimeError):
    """A piece draws otherwise than the whole: more often, or of a shape that is no part of it."""


class Kept:
    """Keeps every random draw.

    Attributes:
        draws: Name of the operation and what it drew, in order.
    """

    def __init__(self) -> None:
        self.draws: list[tuple[str, Any]] = []

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation, and keep it if it draws."""
        result = func(*args, **kwargs)
        if _draws(func):
            self.draws.append((_name(func), tree_map(_copied, _drawn(func, result))))
        return result


class Replayed:
    """Gives, for every random draw, that of the whole batch at the rows of a piece.

    Args:
        kept: The draws of the whole.
        rows: The rows of the piece.
        num_rows: Rows of the whole.
    """

    def __init__(self, kept: Kept, rows: Sequence[int], num_rows: int) -> None:
        self._draws = iter(kept.draws)
        self._rows = list(rows)
        self._num_rows = num_rows

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation; what it draws is taken from the whole."""
        result = func(*args, **kwargs)
        if not _draws(func):
            return result
        name, whole = next(self._draws, ("nothing", torch.empty(0)))
        if name != _name(func):
            raise OtherDraws(f"A piece drew by `{_name(func)}` where the whole drew `{name}`.")
        if name == "native_dropout":
            return self._dropped(args, result, whole)
        for fresh, old in zip(tree_leaves(result), tree_leaves(whole), strict=True):
            if isinstance(fresh, Tensor):
                fresh.copy_(self._part(old, fresh.shape))
        return result

    def _dropped(self, args: tuple[Any, ...], result: Any, mask: Tensor) -> Any:
        own = self._part(mask, result[1].shape)
        scale = 0.0 if args[1] >= 1 else 1.0 / (1.0 - args[1])
        return args[0] * own * scale, own

    def _part(self, whole: Tensor, shape: torch.Size) -> Tensor:
        """Take the rows of the piece, along the one dimension that has them."""
        if whole.shape == shape:
            return whole
        dims = [i for i, (a, b) in enumerate(zip(whole.shape, shape, strict=False)) if a != b]
        num = len(self._rows)
        if whole.ndim == len(shape) and len(dims) == 1:
            dim = dims[0]
            many = whole.shape[dim] // self._num_rows
            if whole.shape[dim] == many * self._num_rows and shape[dim] == many * num:
                moved = whole.movedim(dim, 0)
                rest = moved.shape[1:]
                picked = moved.reshape(self._num_rows, many, *rest)[self._rows]
                return picked.reshape(num * many, *rest).movedim(0, dim)
        raise OtherDraws(
            f"A draw of shape {list(shape)} is no part of one of shape {list(whole.shape)}."
        )


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def _drawn(func: Any, result: Any) -> Any:
    """What of the result is random: of dropout the mask, else all of it."""
    return result[1] if _name(func) == "native_dropout" else result


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
