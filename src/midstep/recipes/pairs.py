"""The built-in recipe `pairs`: two towers that match headings with passages from under them.

The data is the Python reference that ships with CPython: no download. The loss is contrastive: each
title is asked which of the passages *of its forward* is its own, and each passage which of the
titles. So it crosses rows, and no denominator makes it add up: a microbatch of 30 pairs asks among
30, whatever the window holds. Four of them give the exact gradient of the sum of four questions
among 30 each, not that of one question among 120; `midstep verify pairs` shows the gap. Held-out
batches are of the same size, so that the two losses are of one scale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ..clip.norm import ByGlobalNorm
from ..counts import rows
from ..losses import LossSum
from ..schedules import Schedule, cosine
from .passages import VOCAB_SIZE, Batch, loader, pairs_of, sections
from .recipe import Recipe

SHARPNESS = 10.0  # not learned: with a large rate SGD would turn it to 0 before anything is learned
_NOTE = (
    "The loss compares the rows of one forward: the gradient depends on how many pairs a "
    "microbatch has, not only on the window"
)

__all__ = ["TwoTowers", "contrastive", "pairs", "recipe"]


class Tower(nn.Module):
    """Turns a bag of words into a point on the unit sphere.

        f(ids) = u / ||u||,   u = m + W2 relu(W1 m),   m = s / ||s||,   s = sum(embedding[ids])

    Args:
        width: Channels of the embedding and of the point.

    Example:
        >>> Tower(width=8)(torch.tensor([[5, 9, 0, 0]])).norm()
        tensor(1., grad_fn=...)
    """

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(VOCAB_SIZE, width, mode="sum", padding_idx=0)
        # A row's gradient is small, for a point is made of many: short rows turn sooner.
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, ids: Tensor) -> Tensor:
        """Return a point for each row.

        Args:
            ids: Shape [rows, length], int64; 0 is padding.

        Returns:
            Shape [rows, width], each of length 1.
        """
        # As long as it comes, a bag of short rows is drowned by the biases, and SGD learns nothing.
        bag = F.normalize(self.embedding(ids), dim=1)
        return F.normalize(bag + self.layers(bag), dim=1)


class TwoTowers(nn.Module):
    """A tower for titles and one for passages, compared by the angle between their points.

        logits[i, j] = 10 * <title(i), passage(j)>

    Args:
        width: Channels of both towers.

    Example:
        >>> model = TwoTowers(width=8)
        >>> model(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6, 7], [8, 9, 0]])).shape
        torch.Size([2, 2])
    """

    def __init__(self, *, width: int = 64) -> None:
        super().__init__()
        self.titles = Tower(width=width)
        self.passages = Tower(width=width)

    def forward(self, title_ids: Tensor, passage_ids: Tensor) -> Tensor:
        """Compare every title with every passage.

        Args:
            title_ids: Shape [rows, length], int64.
            passage_ids: Shape [rows, length], int64.

        Returns:
            Logits. Shape [rows, rows].
        """
        logits: Tensor = self.titles(title_ids) @ self.passages(passage_ids).T
        return SHARPNESS * logits


def contrastive(logits: Tensor) -> LossSum:
    """Ask each row for its own column, and each column for its own row; sum over rows.

    Args:
        logits: Shape [rows, rows]; what belongs together is on the diagonal.

    Example:
        >>> contrastive(torch.zeros(4, 4)).mean()  # log(4)
        tensor(1.3863)

    Reference: van den Oord, Li & Vinyals 2018, arXiv:1807.03748; both ways as in Radford et al.
    2021, arXiv:2103.00020.
    """
    own = torch.arange(len(logits), device=logits.device)
    by_row = F.cross_entropy(logits, own, reduction="sum")
    by_column = F.cross_entropy(logits.T, own, reduction="sum")
    return LossSum((by_row + by_column) / 2, len(logits))


def recipe(seed: int) -> Recipe:
    """Return the recipe at its usual size.

    Args:
        seed: Decides the first weights and the order of the pairs.
    """
    return pairs(seed=seed)


def pairs(*, seed: int, width: int = 64) -> Recipe:
    """Return the recipe at any size.

    The model is put on the accelerator where there is one.

    Args:
        seed: Decides the first weights and the order of the pairs.
        width: Channels of both towers.

    Example:
        >>> small = pairs(seed=0, width=16)
        >>> small.size, list(small.baselines)
        (4, ['guessing'])
    """
    torch.manual_seed(seed)
    model = TwoTowers(width=width)
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        model.to(accelerator)
    train, held_out = pairs_of(sections())
    judged = loader(held_out, rows=32, generator=None)
    return Recipe(
        model=model,
        train=loader(train, rows=32, generator=torch.Generator().manual_seed(seed)),
        held_out=judged,
        loss=_loss,
        count=rows(),
        optimizer=_optimizer,
        lr=2e-2,
        size=4,
        steps=200,
        clip=ByGlobalNorm(1.0),
        schedule=_schedule,
        baselines={"guessing": _guessing(judged)},
        notes=[_NOTE],
    )


def _loss(model: TwoTowers, batch: Batch) -> LossSum:
    device = model.titles.embedding.weight.device
    return contrastive(model(batch["title_ids"].to(device), batch["passage_ids"].to(device)))


def _optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.5, fused=True)


def _schedule(steps: int) -> Schedule:
    return cosine(total=steps, warmup=steps // 10, minimum=0.1)


def _guessing(batches: DataLoader[Batch]) -> float:
    """The held-out loss of a model to which all pairs look alike: log(n) for each row among n."""
    sizes = [len(batch["title_ids"]) for batch in batches]
    return sum(size * math.log(size) for size in sizes) / sum(sizes)
