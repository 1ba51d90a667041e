"""Gradients brought in before the step, and gradients that arrive as partial sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.loops import SIZE, loss
from distributed.models import WRAPPINGS, batches, gradients, oracle, plain_model, weights, worst
from distributed.processes import run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import midstep as ms

pytestmark = pytest.mark.distributed

COUNTS = (4, 1)


def settle(rank: int, size: int, kind: str, streamed: bool) -> Any:
    """Look at the true gradient before the step, and double it."""
    del size
    wrapped = WRAPPINGS[kind](plain_model())
    optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=0.01, weight_decay=0.1)
    updater = ms.Updater(wrapped.model, optimizer, clip=ms.ByGlobalNorm(0.5))
    found = []
    count = None if streamed else ms.targets()
    data = [(x, y.clamp(min=0)) for x, y in batches(COUNTS[rank], seed=rank)]
    for window in updater.windows(data, size=SIZE, count=count):
        for batch in window:
            with window.forward():
                value = loss(updater.model, batch)
            window.backward(value)
        window.gradients_()
        seen = gradients(wrapped.model)
        for parameter in wrapped.model.parameters():
            parameter.grad.mul_(2.0)
        record = window.step()
        found.append((seen, gradients(wrapped.model), weights(wrapped.model), record))
    return found


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_gradients_brought_in_are_the_true_ones_and_are_stepped_as_they_were_left(
    kind: str, streamed: bool
) -> None:
    parts = [
        [(x, y.clamp(min=0)) for x, y in batches(count, seed=rank)]
        for rank, count in enumerate(COUNTS)
    ]
    first = oracle(parts, size=SIZE)[0]
    for found in run(settle, kind, streamed, size=2):
        seen, stepped, _, record = found[0]
        assert worst(seen, first.gradients) < 1e-14
        factor = min(2.0, 0.5 / first.grad_norm)
        assert worst(stepped, [g * factor for g in first.gradients]) < 1e-14
        assert record.grad_norm == pytest.approx(2 * first.grad_norm, rel=1e-12)
        assert record.denominators == {"loss": first.denominator}
        assert record.loss_mean == pytest.approx(first.loss_mean, rel=1e-12)


class Block(nn.Module):
    """A norm on rows that are split over ranks: each sees a part of its gradient's sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(4).double()
        self.up = nn.Linear(4, 8).double()
        self.down = nn.Linear(8, 4).double()
        with torch.no_grad():
            self.norm.weight.normal_()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu())


ROWS = torch.linspace(-1, 1, 64, dtype=torch.float64).view(2, 8, 4).sin()


def partial(rank: int, size: int) -> Any:
    del rank
    model = Block()
    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)), plan)
    updater = ms.Updater(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        clip=ms.ByGlobalNorm(0.1),
        nonfinite=ms.Raise(every_microbatch=True),
    )
    placements = []

    def own_loss(m: nn.Module, x: Tensor) -> Tensor:
        grad = model.norm.weight.grad
        if isinstance(grad, DTensor):
            placements.append(any(p.is_partial() for p in grad.placements))
        return m(x).square().sum()

    record = updater.update([ROWS[:1], ROWS[1:]], own_loss, count=lambda x: x.shape[1])
    return gradients(model), record.grad_norm, placements


def test_partial_sums_are_added_up_before_they_are_measured() -> None:
    model = Block()
    (model(ROWS).square().sum() / 16).backward()
    true = [p.grad for p in model.parameters()]
    norm = torch.cat([g.flatten() for g in true]).norm().item()
    for grads, grad_norm, placements in run(partial, size=2):
        assert placements == [True]
        assert grad_norm == pytest.approx(norm, rel=1e-12)
        assert worst(grads, [g * min(1.0, 0.1 / norm) for g in true]) < 1e-13
