"""Set-ups for `verify`: models of torch, sound and faulty, each small enough for milliseconds."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import midstep as ms

ROWS, WIDTH, CLASSES, LENGTH = 12, 6, 4, 5


@dataclasses.dataclass
class Setup:
    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], Any]
    count: Callable[[Any], Any] | None = None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    clip: Any = None

    def verify(self) -> ms.Certificate:
        optimizer = None if self.optimizer is None else self.optimizer(self.model)
        return ms.verify(
            self.model,
            self.batch,
            self.loss,
            count=self.count,
            optimizer=optimizer,
            clip=self.clip,
        )


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def vectors() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=seeded())


def labels() -> Tensor:
    """Class labels, about a third of them masked, and never all of a row's piece."""
    found = torch.randint(CLASSES, (ROWS,), generator=seeded())
    found[2::3] = -100
    return found


def full_labels() -> Tensor:
    return torch.randint(CLASSES, (ROWS,), generator=seeded())


def images(size: int = 8) -> Tensor:
    """Strokes on a plain ground, so that many patches are the same."""
    found = torch.zeros(ROWS, 1, size, size)
    for row in range(ROWS):
        found[row, 0, row % size, : 1 + row % 5] = 0.25 + row / ROWS
    return found


def tokens() -> Tensor:
    return torch.randint(20, (ROWS, LENGTH), generator=seeded())


def token_labels() -> Tensor:
    found = tokens().roll(1, 1)
    for row in range(ROWS):
        found[row, : row % LENGTH] = -100
    return found


def pairs() -> tuple[Tensor, Tensor]:
    return vectors(), labels()


def summed(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def mean(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def summed_tokens(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


def mlp(*middle: nn.Module, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, width), *middle, nn.Tanh(), nn.Linear(width, CLASSES))


def conv(*middle: nn.Module, channels: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        *middle,
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(CLASSES),
    )


def image_pairs() -> tuple[Tensor, Tensor]:
    return images(), labels()


def ready(model: nn.Module, batch: Any) -> nn.Module:
    """Let lazy layers find their shapes."""
    torch.manual_seed(1)
    with torch.no_grad():
        model(batch)
    return model
