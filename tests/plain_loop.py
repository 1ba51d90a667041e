"""What the tests of the engine share: small models, batches, and plain torch as the oracle."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]
IGNORED = -100


def classifier(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def pairs(*sizes: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> list[Pair]:
    """Batches of so many rows each, about a third of whose targets are ignored."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for size in sizes:
        x = torch.randn(size, 4, generator=generator, dtype=torch.float64).to(dtype)
        y = torch.randint(3, (size,), generator=generator)
        y[torch.rand(size, generator=generator) < 0.35] = IGNORED
        y[0] = int(torch.randint(3, (), generator=generator))  # never all of them
        batches.append((x, y))
    return batches


def joined(batches: Sequence[Pair]) -> Pair:
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def masked(batch: Pair) -> Pair:
    """The same rows without a target among them."""
    return batch[0], torch.full_like(batch[1], IGNORED)


def loss_sum(model: nn.Module, batch: Pair) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def num_targets(batch: Pair) -> int:
    return int((batch[1] != IGNORED).sum())


def clone(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def true_gradient(model: nn.Module, loss_mean: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    """The gradient of a mean loss over everything at once."""
    twin = clone(model)
    twin.zero_grad()
    loss_mean(twin).backward()
    return gradients(twin)


def full_batch_gradient(model: nn.Module, batches: Sequence[Pair]) -> list[Tensor]:
    x, y = joined(batches)
    return true_gradient(model, lambda twin: F.cross_entropy(twin(x), y))


def distance(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """The largest difference between two lists of tensors; nan counts as infinitely far."""
    gaps = [(a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)]
    return max(math.inf if math.isnan(gap) else gap for gap in gaps)


def norm_of(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors))


def plain_update(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_mean: Tensor, max_norm: float
) -> float:
    """One step of the plain loop, clipped as the formula says: without torch's epsilon."""
    optimizer.zero_grad()
    loss_mean.backward()
    norm = norm_of(gradients(model))
    if norm > max_norm:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(max_norm / norm)
    optimizer.step()
    return norm
