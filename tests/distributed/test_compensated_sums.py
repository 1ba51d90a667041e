"""Compensated sums under DDP: one rounding on each rank, whatever cancels, and no traffic more."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.processes import run
from summing import Held, one, updater_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import midstep as ms
from midstep.accumulation import Wide

pytestmark = pytest.mark.distributed

# Eight microbatches in all, so that no seed is rounded. What is lost comes back in the last, or
# before it.
NUMBERS = ((1e8, 3.0, 0.5, -1e8, 1.0), (2.0**27, 1.125, -(2.0**27)))
EXACT = math.fsum(x for numbers in NUMBERS for x in numbers)
# Whose rest, on the first rank, is still there when the last backward leaves the weight out.
ROUNDED = ((2.0**27, 5.0, 1.0), (-(2.0**27),))

Numbers = tuple[tuple[float, ...], ...]


class Two(nn.Module):
    """A second weight, maybe in half precision, that some microbatches leave out."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.one, self.other = Held(1), Held(1, dtype=dtype)

    def forward(self, x: Tensor, is_left_out: bool) -> Tensor:
        found: Tensor = self.one(x)
        return found if is_left_out else found + self.other(x.to(self.other.weight.dtype)).float()


def window_of(rank: int, kind: str, given: Numbers = NUMBERS) -> tuple[list[float], list[str]]:
    """The sums of its gradients, and all that was called."""
    inner: nn.Module = Held(1)
    if kind == "left out":
        inner = Two()
    elif kind == "beside half precision":
        inner = Two(torch.bfloat16)
    model = DistributedDataParallel(
        inner,
        find_unused_parameters=kind == "left out",
        gradient_as_bucket_view=kind == "bucket views",
    )
    updater = updater_of(model, None if kind == "plain" else Wide(compensated=True))
    numbers = torch.tensor(given[rank])[:, None]

    def loss(model: Any, x: Tensor) -> Tensor:
        if isinstance(inner, Two):
            return model(x, kind == "left out" and x.item() in (3.0, 1.0)).sum()
        return model(x).sum()

    for _ in range(2):  # in the second `.grad` may be a bucket's
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            if kind == "rows":
                windows = updater.windows([numbers], rows=ms.AutoRows(first=1), count=len)
            else:
                windows = updater.windows(list(numbers), size=5, count=one)
            for window in windows:
                updater.update(window, loss)
                found = [8.0 * float(p.grad) for p in inner.parameters() if p.grad is not None]
    return found, [e.name for e in seen.events()]


def sums(rank: int, size: int, kind: str, given: Numbers = NUMBERS) -> list[float]:
    del size
    return window_of(rank, kind, given)[0]


KINDS = ["whole", "bucket views", "left out", "beside half precision", "rows"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_over_ranks_is_rounded_once_on_each(kind: str) -> None:
    found, others = run(sums, kind, size=2)
    assert found == others
    assert found[0] == EXACT
    if kind == "left out":
        assert found[1] == EXACT - 4.0


def test_no_rank_adds_a_rest_to_what_is_the_same_on_all() -> None:
    found, others = run(sums, "left out", ROUNDED, size=2)
    assert found == others == [0.0, 0.0]


def test_additions_of_autograd_lose_it() -> None:
    found, _ = run(sums, "plain", size=2)
    assert found[0] != EXACT


def collectives(rank: int, size: int, kind: str) -> Counter[str]:
    del size
    return Counter(name for name in window_of(rank, kind)[1] if "gloo" in name or "c10d" in name)


def test_it_takes_no_collective_more() -> None:
    plain, own = run(collectives, "plain", size=2), run(collectives, "whole", size=2)
    assert plain == own
    assert sum(plain[0].values())


def broken(rank: int, size: int) -> tuple[str, float]:
    del size
    model = DistributedDataParallel(Held(1))
    updater = updater_of(model, Wide(compensated=True), nonfinite=ms.Skip())
    numbers = [[1e8, 3.0, math.inf, -math.inf], [1e8, 3.0, 1.0, 1.0]][rank]
    record = updater.update([torch.tensor([x]) for x in numbers], loss_of, count=one)
    updater.update([torch.tensor([x]) for x in (1e8, 3.0, -1e8, 0.0)], loss_of, count=one)
    return str(record.verdict.value), 4.0 * float(model.module.weight.grad)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).sum()
    return found


def test_what_is_not_finite_on_one_rank_is_skipped_by_all_and_leaves_nothing() -> None:
    for verdict, after in run(broken, size=2):
        assert verdict == "skipped_nonfinite"
        assert after == 3.0


def refusals(rank: int, size: int) -> list[str]:
    del rank
    mesh = init_device_mesh("cpu", (size,))
    found = []
    for kind in ("FSDP2", "tensor parallel"):
        model = nn.Sequential(nn.Linear(4, 4))
        if kind == "FSDP2":
            fully_shard(model, mesh=mesh)
        else:
            parallelize_module(model, mesh, {"0": ColwiseParallel()})
        try:
            updater_of(model, Wide(compensated=True))
        except ValueError as error:
            found.append(str(error))
        dist.barrier()
    return found


def test_sums_that_are_split_over_ranks_are_refused() -> None:
    for found in run(refusals, size=2):
        assert len(found) == 2
        assert all("FSDP2 or tensor parallel splits" in text for text in found)
