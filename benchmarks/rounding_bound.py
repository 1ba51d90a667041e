"""How wide `verify`'s bound is: the true error of a float32 gradient over two bounds for it.

The truth is the same gradient in float64. Below 1 a bound holds; far below 1 it is wide, and small
faults fit in. "moved" is what `verify` uses: how far the gradient goes when inputs are moved.
"lengths" needs no second run: 6 sqrt(n) u times the summed lengths of the gradients of the rows, n
the number of rows.

    python benchmarks/rounding_bound.py
"""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from midstep.verifying import rounding
from midstep.verifying.operations import seen_by

ROWS = 64


def deep(depth: int) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10))


def convolutional() -> nn.Module:
    parts = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3), nn.GroupNorm(4, 16), nn.ReLU()]
    return nn.Sequential(*parts, nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(256, 10))


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (8, 8)), layer, nn.Flatten(), nn.Linear(64, 10))


def confident() -> nn.Module:
    """Nearly certain of its answers, so that the gradient is what is left of a cancellation."""
    model = deep(2)
    with torch.no_grad():
        model[-1].weight.mul_(100)
    return model


class Shifted(nn.Module):
    """Adds a large number and takes it away again, as an unlucky normalisation does."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1e4) - 1e4


def cancelling() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), Shifted(), nn.GELU(), nn.Linear(64, 10))


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    return [p.grad.double().clone() for p in model.parameters() if p.grad is not None]


def shares(make: Callable[[], nn.Module], seed: int) -> list[tuple[float, float]]:
    torch.manual_seed(seed)
    model = make()
    x, y = torch.randn(ROWS, 64), torch.randint(10, (ROWS,))
    found = gradient(model, x, y)
    drifts = []
    for draw in range(rounding.NUM_DRAWS):
        with seen_by(rounding.Moved(torch.Generator().manual_seed(draw))):
            drifts.append(
                [(a - b).norm() for a, b in zip(gradient(model, x, y), found, strict=True)]
            )
    rows = [gradient(model, x[i : i + 1], y[i : i + 1]) for i in range(ROWS)]
    lengths = [sum(g.norm() for g in column) / ROWS for column in zip(*rows, strict=True)]
    unit = rounding.LAMBDA * math.sqrt(ROWS) * rounding.unit_roundoff(torch.float32)
    true = gradient(copy.deepcopy(model).double(), x.double(), y)
    return [
        (((a - b).norm() / max(moved)).item(), ((a - b).norm() / (unit * length)).item())
        for a, b, length, *moved in zip(found, true, lengths, *drifts, strict=True)
        if max(moved) > 0
    ]


MODELS = {
    "1 layer": lambda: deep(1),
    "4 layers": lambda: deep(4),
    "16 layers": lambda: deep(16),
    "LayerNorm": normed,
    "convolution, GroupNorm": convolutional,
    "transformer layer": attention,
    "confident": confident,
    "cancelling": cancelling,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"{'true error over the bound':24}{'tensors':>9}{'median':>10}{'largest':>10}")
    for name, make in MODELS.items():
        pairs = [pair for seed in range(20) for pair in shares(make, seed)]
        for way, column in zip(("moved", "lengths"), zip(*pairs, strict=True), strict=True):
            found = sorted(column)
            middle = found[len(found) // 2]
            label = f"{name}, {way}"
            print(f"{label:34}{len(found):6}{middle:10.4f}{found[-1]:10.4f}")
