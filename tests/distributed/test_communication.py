"""What travels between ranks, and how often: once a window, and at most two small collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.loops import LOOPS, loss
from distributed.models import (
    WRAPPINGS,
    batches,
    gradients,
    oracle,
    plain_model,
    worst,
)
from distributed.processes import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import midstep as ms

pytestmark = pytest.mark.distributed


class Traffic(TorchDispatchMode):
    """Counts the operations of the process group by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._schema.name.partition("::")[2].rstrip("_")] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def traffic() -> Iterator[Counter[str]]:
    with Traffic() as mode:
        yield mode.counts


def ddp_window(rank: int, size: int, buckets: int, load: tuple[int, ...]) -> dict[str, Any]:
    """Three windows of DDP; its reductions are seen by a hook in the place of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)).double()
    cap = 100.0 if buckets == 1 else 0.03  # MB; each weight takes 0.03
    wrapped = DistributedDataParallel(model, bucket_cap_mb=cap)
    reduced: list[int] = []

    def hook(group, bucket):  # type: ignore[no-untyped-def] # DDP reads annotations as classes
        del group
        reduced.append(bucket.index())
        tensor = bucket.buffer().div_(size)
        return dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0])

    wrapped.register_comm_hook(None, hook)
    updater = ms.Updater(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.01))
    rows = []
    data = [torch.randn(3, 64, dtype=torch.float64) for _ in range(3 * load[rank])]
    for window in updater.windows(data, size=max(load[rank], 1), count=ms.rows()):
        before = updater._ranks.world.num_collectives
        del reduced[:]
        with traffic() as counts:
            updater.update(window, lambda m, x: m(x).square().sum())
        own = updater._ranks.world.num_collectives - before
        rows.append((len(reduced), own, dict(counts)))
    return {"rows": rows, "buckets": len(set(reduced))}


@pytest.mark.parametrize("load", [(3, 3), (3, 1), (2, 0)])
@pytest.mark.parametrize("buckets", [1, 3])
def test_ddp_reduces_each_bucket_once_a_window(buckets: int, load: tuple[int, ...]) -> None:
    for result in run(ddp_window, buckets, load, size=2):
        assert len(result["rows"]) == 3
        for index, (reduced, own, counts) in enumerate(result["rows"]):
            # DDP makes its buckets anew after the first window, in the order gradients came.
            if index:
                assert reduced == result["buckets"]
                assert (result["buckets"] > 1) == (buckets > 1)
            assert own == 1  # and one when it was opened
            # Buffers of two dtypes, from rank 0; once, the order of the new buckets, too.
            assert counts["broadcast"] == (4 if index == 1 else 2)


def small_collectives(rank: int, size: int, kind: str) -> list[tuple[int, Counter[str]]]:
    """Each window's own collectives, by the library's count and by the process group's."""
    del rank, size
    wrapped = WRAPPINGS[kind](plain_model())
    updater = ms.Updater(
        wrapped.model,
        torch.optim.SGD(wrapped.model.parameters(), lr=0.1),
        clip=ms.Chain(ms.ByTensorNorm(1.0), ms.ByGlobalNorm(1.0)),
        empty=ms.Skip(),
        nonfinite=ms.Skip(),
    )
    data = batches(8, seed=wrapped.data_rank)
    world = updater._ranks.world
    before, rows = world.num_collectives, []
    for record in LOOPS["update"](updater, data):
        rows.append(world.num_collectives - before)
        before = world.num_collectives
        assert record.applied
    return rows


@pytest.mark.parametrize("kind", WRAPPINGS)
def test_a_window_costs_two_small_collectives(kind: str) -> None:
    for rows in run(small_collectives, kind, size=4):
        # The first also exchanges the names of terms where a rank has none.
        assert all(row <= 2 for row in rows[1:]), rows


def opened_and_measured(rank: int, size: int) -> dict[str, int]:
    """What the process group runs in a window of tensor parallel, beyond forward and backward."""
    del rank, size
    wrapped = WRAPPINGS["TP"](plain_model())
    updater = ms.Updater(wrapped.model, torch.optim.SGD(wrapped.model.parameters(), lr=0.1))
    data = batches(4, seed=0)
    for window in updater.windows(data[:2], size=2, count=ms.targets()):
        updater.update(window, loss)
    with traffic() as counts:
        for window in updater.windows(data[2:], size=2, count=ms.targets()):
            with Traffic() as inner:
                for batch in window:
                    with window.forward():
                        value = loss(updater.model, batch)
                    window.backward(value)
            window.step()
            break
    return dict(counts - inner.counts)


def test_the_process_group_runs_no_more_than_the_library_counts() -> None:
    for counts in run(opened_and_measured, size=2):
        assert counts == {"allreduce": 2}


def sharded_window(rank: int, size: int, kind: str, options: dict[str, bool]) -> Any:
    del size
    wrapped = WRAPPINGS[kind](plain_model())
    updater = ms.Updater(
        wrapped.model,
        torch.optim.AdamW(wrapped.model.parameters(), lr=0.01, weight_decay=0.1),
        sharding=ms.Sharding(**options),
    )
    found = []
    data = [(x, y.clamp(min=0)) for x, y in batches(9, seed=rank)]
    for window in updater.windows(data, size=3, count=ms.targets()):
        with traffic() as counts:
            for batch in window:
                with window.forward():
                    value = loss(updater.model, batch)
                window.backward(value)
        window.step()
        found.append((gradients(wrapped.model), dict(counts)))
    return found


@pytest.mark.parametrize("kind", ["FSDP2", "HSDP"])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("reduce", [False, True])
def test_sharding_trades_traffic_and_never_the_gradient(
    kind: str, keep: bool, reduce: bool
) -> None:
    options = {"keep_gathered": keep, "reduce_every_microbatch": reduce}
    size = 2 if kind == "FSDP2" else 4
    parts = [[(x, y.clamp(min=0)) for x, y in batches(9, seed=rank)] for rank in range(size)]
    wanted = oracle(parts, size=3)
    for found in run(sharded_window, kind, options, size=size):
        for (grads, counts), step in zip(found, wanted, strict=True):
            assert worst(grads, step.gradients) < 1e-12
            # Three groups; all but the root's are gathered once in forward and again in backward.
            gathers = sum(n for op, n in counts.items() if "gather" in op)
            scatters = sum(n for op, n in counts.items() if "reduce_scatter" in op)
            assert gathers == (3 if keep else 3 * 5), counts
            assert scatters == (9 if reduce else 3), counts
