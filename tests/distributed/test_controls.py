"""The loops that people write fail the comparison of the table, so that it can fail."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
    weights,
)
from distributed.processes import run
from distributed.test_table import check
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.distributed

MAX_NORM = 0.1


def data_of(rank: int) -> list[Batch]:
    """Equally many batches a rank, of unequal numbers of targets, and never none."""
    found = []
    for inputs, labels in batches(2 * SIZE, seed=rank):
        labels[0] = 1
        found.append((inputs, labels))
    return found


def loop(rank: int, size: int, local_clip: bool, own_mean: bool) -> Any:
    """Average over microbatches, then over ranks; clip what lies here, or the whole."""
    model = WRAPPINGS["FSDP2" if local_clip else "DDP"](plain_model()).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    rows = []
    for start in range(0, len(data_of(0)), SIZE):
        everyone = [batch for r in range(size) for batch in data_of(r)[start : start + SIZE]]
        denominator = sum(int((y != IGNORED).sum()) for _, y in everyone)
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for inputs, labels in data_of(rank)[start : start + SIZE]:
            loss = F.cross_entropy(model(inputs), labels, reduction="mean" if own_mean else "sum")
            loss = loss / SIZE if own_mean else loss * (size / denominator)
            loss.backward()
            total += loss.detach() / size
        dist.all_reduce(total)
        parts = [p.grad for p in model.parameters()]
        parts = [part.to_local() if isinstance(part, DTensor) else part for part in parts]
        norm = math.sqrt(sum(part.square().sum().item() for part in parts))
        for part in parts:
            part.mul_(min(1.0, MAX_NORM / norm))
        optimizer.step()
        record = SimpleNamespace(
            grad_norm=norm,
            loss_mean=total.item(),
            denominators={"loss": denominator},
            num_microbatches=len(everyone),
        )
        rows.append((gradients(model), weights(model), record))
    return rows


def judge(rows: Any) -> None:
    wanted = oracle([data_of(rank) for rank in range(2)], size=SIZE, max_norm=MAX_NORM)
    check(rows, wanted, tolerance=1e-12, weight_tolerance=1e-12)


def test_a_loop_with_one_denominator_and_a_whole_norm_passes() -> None:
    for rows in run(loop, False, False, size=2):
        judge(rows)


@pytest.mark.parametrize(
    ("local_clip", "own_mean"),
    [(False, True), (True, False)],
    ids=["a mean of the ranks' means", "a clip by the norm of what lies here"],
)
def test_the_loops_that_people_write_fail(local_clip: bool, own_mean: bool) -> None:
    for rows in run(loop, local_clip, own_mean, size=2):
        with pytest.raises(AssertionError):
            judge(rows)
