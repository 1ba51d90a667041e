"""A recipe: everything a run needs besides the engine, from which every command starts.

Built-in recipes and a user's own file give the same thing: a function `recipe(seed)` that returns a
`Recipe`. Training, certificates, range tests and plans all read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..clip.rule import Rule
from ..cutting import Count
from ..precision import FP32, Precision
from ..window import Loss

__all__ = ["Recipe"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What to train, on what, and with which defaults; the command's options override the defaults.

    Attributes:
        model: Freshly made; its random state was set by the seed.
        train: The training batches of one epoch; iterated once an epoch, so a `DataLoader`, not a
            generator. Give a shuffled one its own `torch.Generator`.
        loss: `loss(model, microbatch)`: the loss *sum*, as a tensor, a `LossSum`, or one per term.
        count: What the mean is over, in one microbatch; None when the losses carry their counts.
        optimizer: Makes the optimizer from the model and the base rate.
        held_out: Batches to judge by; None for no such judgement.
        lr: Base rate.
        size: Batches a window; or give `rows` or `targets`, exactly one of the three.
        rows: Each batch is a window, cut into microbatches of at most so many rows.
        targets: As many batches a window as hold at least so many targets.
        steps: Applied updates of a whole run.
        clip: Bounds the gradient; None only measures it.
        precision: What the forward runs in.
        schedule: Given the whole number of applied updates, makes the factor on the base rate as a
            function of the step; None for a constant rate.
        baselines: Held-out losses to beat, by name, such as that of guessing by frequency.
        notes: What a reader of the summary must know, such as where the equality of cuts ends.

    Raises:
        ValueError: Not exactly one of `size`, `rows` and `targets`, or a number is out of range.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> Recipe(
        ...     model=model,
        ...     train=[torch.ones(3, 2)],
        ...     loss=lambda model, x: model(x).square().sum(),
        ...     count=len,
        ...     optimizer=lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr),
        ...     size=1,
        ... ).steps
        100
    """

    model: nn.Module
    train: Iterable[Any]
    loss: Callable[[Any, Any], Loss | Mapping[str, Loss]]
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]
    count: Count | None = None
    held_out: Iterable[Any] | None = None
    lr: float = 1e-3
    size: int | None = None
    rows: int | None = None
    targets: int | None = None
    steps: int = 100
    clip: Rule | None = None
    precision: Precision = FP32()
    schedule: Callable[[int], Callable[[int], float]] | None = None
    baselines: Mapping[str, float] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        given = [way for way in (self.size, self.rows, self.targets) if way is not None]
        if len(given) != 1 or given[0] < 1:
            raise ValueError(
                f"`Recipe(size={self.size}, rows={self.rows}, targets={self.targets})`: give "
                "exactly one of the three, at least 1, because each says in its own way which "
                "microbatches make one update."
            )
        if not self.lr > 0 or self.steps < 1:
            raise ValueError(
                f"`Recipe(lr={self.lr}, steps={self.steps})`: the rate must be greater than 0 and "
                "there must be at least 1 update, or nothing is trained."
            )

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        tensor = next(self.model.parameters(), None)
        return torch.device("cpu") if tensor is None else tensor.device
