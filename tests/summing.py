"""What the tests of compensated sums share: microbatches that cancel, and sums in float64."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import midstep as ms
from midstep.accumulation import Wide

UNIT = 2.0**-24  # of float32


class Held(nn.Module):
    """Its gradient is what it is given."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def held_loss(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).sum()
    return found


def one(_: object) -> int:
    return 1


def held_sum(grads: Sequence[Tensor], accumulation: Any) -> Tensor:
    """The sum of gradients, as many as a power of two, so that no seed is rounded."""
    assert math.log2(len(grads)).is_integer()
    model = Held(*grads[0].shape, dtype=grads[0].dtype)
    updater = updater_of(model, accumulation)
    updater.update(list(grads), held_loss, count=one)
    assert model.weight.grad is not None
    return model.weight.grad * len(grads)


def updater_of(model: nn.Module, accumulation: Any, **stages: Any) -> ms.Updater:
    optimizer = stages.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.0)
    return ms.Updater(model, optimizer, accumulation=accumulation, **stages)


class Part(NamedTuple):
    """A microbatch, and what its loss is multiplied by."""

    x: Tensor
    by: float


def cancelling(x: Sequence[Tensor], large: float = 2.0**20) -> list[Part]:
    """The first batch in front, a million times as large, and taken back at the end."""
    return [Part(x[0], large), *(Part(rows, 1.0) for rows in x), Part(x[0], -large)]


Loss = Callable[[Any, Part], Any]


def in_float64(model: nn.Module, parts: Sequence[Part], loss: Loss) -> list[Tensor]:
    """The sum of the very gradients that single backwards give; what gets none is left out."""
    total: dict[nn.Parameter, Tensor] = {}
    for part in parts:
        model.zero_grad()
        loss(model, part).backward(torch.tensor(1.0 / len(parts)))
        for p in model.parameters():
            if p.grad is not None:
                total[p] = total.get(p, torch.zeros_like(p, dtype=torch.float64)) + p.grad.double()
    model.zero_grad()
    return [total[p] for p in model.parameters() if p in total]


def error_of(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Root mean square of the differences, over that of the truth."""
    gap = sum(float((a.double() - b).square().sum()) for a, b in zip(found, truth, strict=True))
    return math.sqrt(gap / sum(float(b.square().sum()) for b in truth))


def errors(make: Callable[[], nn.Module], parts: Sequence[Part], loss: Loss) -> tuple[float, float]:
    """How far a window is from its sum in float64: by autograd's additions, and compensated."""
    found = []
    for accumulation in (None, Wide(compensated=True)):
        model = make()
        truth = in_float64(model, parts, loss)
        updater = updater_of(model, accumulation)
        for _ in range(2):  # the second window finds what the first left
            updater.update(list(parts), loss, count=one)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found.append(error_of(grads, truth))
    return found[0], found[1]
