"""Counts: what the mean loss of a batch is over.

A count function takes a microbatch and returns a number, or a dict of one number per loss term. It
runs before any forward, on the batch as the loader made it: on tensors in host memory it costs a
read of the labels; on an accelerator also one host sync a microbatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .batches import num_rows

__all__ = ["elements", "rows", "targets", "unit_of"]

Key = str | int | Callable[[Any], Tensor] | None

_LABEL_NAMES = ("labels", "label", "targets", "target")


@dataclasses.dataclass(frozen=True, slots=True)
class _Targets:
    ignore_index: int
    shift: bool
    weight: Tensor | None
    key: Key

    def __call__(self, batch: Any) -> float:
        labels = _find(batch, self.key)
        if labels.is_floating_point():
            raise TypeError(
                f"`targets()`: labels are {labels.dtype}, so they are no class indices and no "
                "label is `ignore_index`. For probabilities count `rows()`, for regression "
                "`elements()`."
            )
        if self.shift:
            labels = labels[..., 1:]
        is_target = labels != self.ignore_index
        if self.weight is None:
            return int(is_target.sum().item())
        weight = self.weight.to(labels.device, torch.float64)
        return float(weight[labels[is_target].long()].sum().item())  # uint8 would be a mask


def targets(
    *,
    ignore_index: int = -100,
    shift: bool = False,
    weight: Tensor | None = None,
    key: Key = None,
) -> Callable[[Any], float]:
    """Count supervised targets: the denominator of torch's mean cross entropy.

        count = number of labels != ignore_index; with class weights the sum of weight[label] over
        them

    Args:
        ignore_index: The label that is no target.
        shift: Leave out the first label of every row, for a loss that shifts causally.
        weight: The class weights of the loss. Shape [num_classes].
        key: Where the labels are: a name, an index, or a function of the batch. Left out: the batch
            itself, the last item of a tuple or list, or the one entry of a mapping that is named
            labels, label, targets or target.

    Returns:
        The count function.

    Raises:
        KeyError: (when called) The batch has no such entry.
        TypeError: (when called) Labels are not class indices.

    Example:
        >>> targets(key="labels")({"labels": torch.tensor([[1, 2, -100], [-100, 3, 4]])})
        4
        >>> targets(shift=True)(torch.tensor([[1, 2, -100], [-100, 3, 4]]))
        3
        >>> targets(weight=torch.tensor([1.0, 0.5]))((None, torch.tensor([0, 1, 1, -100])))
        2.0
    """
    return _Targets(ignore_index, shift, weight, key)


def rows() -> Callable[[Any], float]:
    """Count rows: the denominator of a loss that gives one value a row.

    Returns:
        The count function.

    Raises:
        ValueError: (when called) The parts of the batch disagree on its rows.

    Example:
        >>> rows()((torch.zeros(5, 3), torch.zeros(5)))
        5
    """
    return num_rows


@dataclasses.dataclass(frozen=True, slots=True)
class _Elements:
    key: Key

    def __call__(self, batch: Any) -> float:
        return _find(batch, self.key).numel()


def elements(*, key: Key = None) -> Callable[[Any], float]:
    """Count elements: the denominator of torch's mean squared error and its like.

    Args:
        key: Where the target tensor is, as in `targets`.

    Returns:
        The count function.

    Raises:
        KeyError: (when called) The batch has no such entry.

    Example:
        >>> elements()((torch.zeros(5, 8), torch.zeros(5, 3)))
        15
    """
    return _Elements(key)


def unit_of(count: Callable[[Any], Any] | None) -> str:
    """Say in a word what a count function counts; targets where that is not known.

    Example:
        >>> unit_of(rows()), unit_of(elements()), unit_of(None)
        ('rows', 'elements', 'targets')
    """
    if count is num_rows:
        return "rows"
    return "elements" if isinstance(count, _Elements) else "targets"


def _find(batch: Any, key: Key) -> Tensor:
    if callable(key):
        return key(batch)
    if key is not None:
        try:
            found: Tensor = batch[key]
        except (KeyError, IndexError, TypeError) as error:
            raise KeyError(f"no `{key!r}` in a {_describe(batch)}") from error
        return found
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, (tuple, list)) and batch:
        return batch[-1]  # type: ignore[no-any-return]
    if isinstance(batch, Mapping):
        names = [name for name in _LABEL_NAMES if name in batch]
        if len(names) == 1:
            return batch[names[0]]  # type: ignore[no-any-return]
    raise KeyError(
        f"cannot tell where the labels are in a {_describe(batch)}; pass `key=` to the count"
    )


def _describe(batch: object) -> str:
    if isinstance(batch, Mapping):
        return f"{type(batch).__name__} with {', '.join(map(repr, batch))}"
    return f"{type(batch).__name__} batch"
