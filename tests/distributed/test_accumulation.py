"""Accumulation of one's own on several ranks: exact under DDP and FSDP2, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.loops import SIZE, first_door
from distributed.models import batches, gradients, oracle, plain_model, worst
from distributed.processes import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import midstep as ms
from midstep.accumulation import Fused, Wide

pytestmark = pytest.mark.distributed

LOADS = (4, 1)
NUM_ONES = 600  # in bfloat16 a sum of ones stalls at 256


def fused_under_ddp(rank: int, size: int) -> Any:
    del size
    model = DistributedDataParallel(plain_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    updater = ms.Updater(model, optimizer, accumulation=Fused(0))
    data = batches(LOADS[rank], seed=rank)
    return [(gradients(model), record.grad_norm) for record in first_door(updater, data)]


def test_fused_gradients_under_ddp_are_those_of_all_ranks_together() -> None:
    parts = [batches(count, seed=rank) for rank, count in enumerate(LOADS)]
    wanted = oracle(parts, size=SIZE)
    for found in run(fused_under_ddp, size=2):
        assert len(found) == len(wanted) == 2
        for (grads, norm), step in zip(found, wanted, strict=True):
            assert worst(grads, step.gradients) < 1e-12
            assert norm == pytest.approx(step.grad_norm, rel=1e-10)


class Weighted(nn.Module):
    """Its gradient is the number of rows; a second parameter is used on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(1, 1, bias=False).bfloat16()
        self.other = nn.Linear(1, 1, bias=False).bfloat16()
        self.never = nn.Linear(1, 1, bias=False).bfloat16()


def wide_sums(rank: int, size: int, kind: str) -> Any:
    model: Any = Weighted()
    ones = [torch.ones(1, 1).bfloat16()] * (NUM_ONES if rank == 0 else NUM_ONES // 2)
    if kind == "DDP":
        inner = model

        def forward(x: Any) -> Any:
            return inner.one(x) + (inner.other(x) if rank == 0 else 0.0)

        model.forward = forward
        model = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        model = nn.Sequential(nn.Linear(1, 1, bias=False)).bfloat16()
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)), mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    updater = ms.Updater(model, optimizer, accumulation=Wide())
    total = NUM_ONES * 3 // 2  # undoes the seed, so that entries are whole numbers
    found = []
    for window in updater.windows(ones, size=NUM_ONES, count=lambda _: 1):
        updater.update(window, lambda m, x: m(x).float().sum() * total)
        found = gradients(model)
    return found


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_wide_sums_of_all_ranks_are_rounded_once(kind: str) -> None:
    total = float(torch.tensor(NUM_ONES * 1.5).bfloat16())
    for found in run(wide_sums, kind, size=2):
        assert float(found[0]) == total
        if kind == "DDP":
            assert float(found[1]) == float(torch.tensor(float(NUM_ONES)).bfloat16())
            assert found[2] is None


def refusals(rank: int, size: int) -> list[str]:
    del rank
    found = []
    mesh = init_device_mesh("cpu", (size,))
    for accumulation in (Wide(), Fused(0)):
        model = nn.Sequential(nn.Linear(4, 4)).bfloat16()
        fully_shard(model, mesh=mesh)
        try:
            ms.Updater(model, torch.optim.SGD(model.parameters()), accumulation=accumulation)
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_ranks_cannot_do_is_refused() -> None:
    for wide, fused in run(refusals, size=2):
        assert "torch.bfloat16" in wide
        assert "reduce_dtype=torch.float32" in wide
        assert "FSDP2 or tensor parallel splits" in fused
