"""The loops that people write fail the same comparison, so that it can fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed.loops import SIZE
from distributed.models import (
    IGNORED,
    WRAPPINGS,
    Batch,
    batches,
    gradients,
    oracle,
    plain_model,
    worst,
)
from distributed.processes import run
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.distributed

MAX_NORM = 0.1


def data_of(rank: int) -> list[Batch]:
    """Equally many batches a rank, of unequal numbers of targets, and never none."""
    found = []
    for inputs, labels in batches(2, seed=rank):
        labels[0] = 1
        found.append((inputs, labels))
    return found


def mean_of_means(rank: int, size: int, local_clip: bool, own_mean: bool) -> Any:
    """Average over microbatches, then over ranks; clip what lies here, or the whole."""
    kind = "FSDP2" if local_clip else "DDP"
    model = WRAPPINGS[kind](plain_model()).model
    denominator = sum(int((y != IGNORED).sum()) for r in range(size) for _, y in data_of(r))
    for inputs, labels in data_of(rank):
        loss = F.cross_entropy(model(inputs), labels, reduction="mean" if own_mean else "sum")
        loss = loss / SIZE if own_mean else loss * (size / denominator)
        loss.backward()
    grads = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()
    ]
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))
    for grad in grads:
        grad.mul_((MAX_NORM / norm).clamp(max=1.0))
    return gradients(model)


def wanted(max_norm: float = MAX_NORM) -> list[torch.Tensor]:
    return oracle([data_of(rank) for rank in range(2)], size=SIZE, max_norm=max_norm)[0].gradients


def test_a_loop_with_one_denominator_and_a_whole_norm_passes() -> None:
    for found in run(mean_of_means, False, False, size=2):
        assert worst(found, wanted()) < 1e-12


def test_a_mean_of_means_fails() -> None:
    for found in run(mean_of_means, False, True, size=2):
        assert worst(found, wanted()) > 1e-3


def test_a_clip_by_the_norm_of_local_shards_fails() -> None:
    for found in run(mean_of_means, True, False, size=2):
        assert worst(found, wanted()) > 1e-3
