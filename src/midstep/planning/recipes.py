"""What a plan reads of a recipe: its first batch, its optimizer, and how much an update is over."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..batches import num_rows
from ..cutting import Count
from ..losses import LossSum

__all__ = ["first_batch", "leading_count", "loss_on", "make_optimizer", "rows_of_update"]


class Planned(Protocol):
    """What is read of a recipe."""

    @property
    def model(self) -> nn.Module:
        """Which is traced."""
        ...

    @property
    def train(self) -> Iterable[Any]:
        """Its batches."""
        ...

    @property
    def loss(self) -> Callable[[Any, Any], Any]:
        """The loss sum of a microbatch."""
        ...

    @property
    def optimizer(self) -> Callable[[nn.Module, float], torch.optim.Optimizer]:
        """Makes the optimizer."""
        ...

    @property
    def count(self) -> Count | None:
        """What the mean is over."""
        ...

    @property
    def lr(self) -> float:
        """The base rate."""
        ...

    @property
    def size(self) -> int | None:
        """Batches a window."""
        ...

    @property
    def targets(self) -> int | None:
        """Targets a window."""
        ...


def first_batch(recipe: Planned) -> Any:
    """Read the first training batch.

    Args:
        recipe: Whose.

    Raises:
        ValueError: There is none.
    """
    for batch in recipe.train:
        return batch
    raise ValueError("The recipe's training batches are none, so there is nothing to plan with.")


def make_optimizer(recipe: Planned) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Have the recipe make its optimizer at its own rate.

    Args:
        recipe: Whose.
    """
    return lambda model: recipe.optimizer(model, recipe.lr)


def rows_of_update(recipe: Planned, batch: Any) -> int:
    """Count the rows of an update of one rank, as the recipe cuts its windows.

    Args:
        recipe: Whose.
        batch: Its first batch, which stands for the others.
    """
    here = num_rows(batch)
    if recipe.size is not None:
        return here * recipe.size
    if recipe.targets is None:
        return here
    assert recipe.count is not None  # a recipe by targets has one
    return here * max(1, math.ceil(recipe.targets / max(leading_count(recipe.count, batch), 1.0)))


def leading_count(count: Count, batch: Any) -> float:
    """Count a batch; of several terms the first, as windows by targets do.

    Args:
        count: Of the update.
        batch: To count.
    """
    found = count(batch)
    return float(next(iter(found.values())) if isinstance(found, Mapping) else found)


def loss_on(recipe: Planned, batch: Any) -> Callable[[nn.Module], Tensor]:
    """Give the loss of a batch as a function of the model.

    Args:
        recipe: Whose loss.
        batch: To run.
    """

    def loss(model: nn.Module) -> Tensor:
        value = recipe.loss(model, batch)
        values = list(value.values()) if isinstance(value, Mapping) else [value]
        parts = [part.sum if isinstance(part, LossSum) else part for part in values]
        total: Tensor = sum(parts[1:], parts[0])
        return total

    return loss
