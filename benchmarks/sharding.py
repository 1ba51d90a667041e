"""What do the options of `Sharding` cost and save in a window of FSDP2?

    python benchmarks/sharding.py [MICROBATCHES]

Two processes over gloo train an 8-layer perceptron. Each option is timed in turn, window by window,
so that a slow moment hits all of them. Memory is what the process holds of gradients and of whole
parameters between two microbatches, counted, not measured.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from timing import machine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import midstep as ms
from midstep.ranks.fsdp import fsdp_groups

SIZE = 2
LAYERS, WIDTH, ROWS = 8, 1024, 32
ROUNDS, WARMUP = 12, 2
OPTIONS = {
    "neither": ms.Sharding(),
    "keep_gathered": ms.Sharding(keep_gathered=True),
    "reduce_every_microbatch": ms.Sharding(reduce_every_microbatch=True),
    "both": ms.Sharding(reduce_every_microbatch=True, keep_gathered=True),
}


class Traffic(TorchDispatchMode):
    """Counts the operations of the process group."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def updater_of(sharding: ms.Sharding) -> ms.Updater:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    mesh = init_device_mesh("cpu", (SIZE,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return ms.Updater(model, optimizer, sharding=sharding)


def held(updater: ms.Updater) -> tuple[int, int]:
    """Bytes of gradients, and of whole parameters, that lie here between two microbatches."""
    modules = [m for m in updater.model.modules() if hasattr(m, "_get_fsdp_state")]
    hidden = sum(t.nbytes for group in fsdp_groups(modules) for t in group.hidden_gradients())
    shards = sum(
        p.grad.to_local().nbytes
        for group in fsdp_groups(modules)
        for p in group.sharded
        if p.grad is not None
    )
    whole = sum(
        t.untyped_storage().size()
        for group in fsdp_groups(modules)
        for p in group._group.fsdp_params  # noqa: SLF001 - nobody else says what is gathered
        for t in p.all_gather_outputs
    )
    return hidden + shards, whole


def window(updater: ms.Updater, batches: list[torch.Tensor]) -> tuple[float, tuple[int, int]]:
    memory = (0, 0)
    started = time.perf_counter()
    for opened in updater.windows(batches, size=len(batches), count=ms.rows()):
        for x in opened:
            with opened.forward():
                value = updater.model(x).square().sum()
            opened.backward(value)
            if opened.index == len(batches) - 2:
                memory = held(updater)
        opened.step()
    return time.perf_counter() - started, memory


def work(rank: int, pipe: Any, count: int) -> None:
    torch.set_num_threads(1)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, SIZE, is_master=True, wait_for_workers=False)
        pipe.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    batches = [torch.randn(ROWS, WIDTH) for _ in range(count)]
    updaters = {name: updater_of(sharding) for name, sharding in OPTIONS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in OPTIONS}
    memory: dict[str, tuple[int, int]] = {}
    traffic: dict[str, Counter[str]] = {}
    for index in range(WARMUP + ROUNDS):
        for name, updater in updaters.items():
            dist.barrier()
            taken, memory[name] = window(updater, batches)
            if index >= WARMUP:
                seconds[name].append(taken)
    for name, updater in updaters.items():
        with Traffic() as mode:
            window(updater, batches)
        traffic[name] = mode.counts
    if rank == 0:
        report(count, seconds, memory, traffic)
    dist.barrier()
    dist.destroy_process_group()


def report(count: int, seconds: Any, memory: Any, traffic: Any) -> None:
    print(f"\n{count} microbatches of {ROWS} rows, {LAYERS} layers of {WIDTH}, {SIZE} ranks")
    titles = "".join(
        f"{t:>9}" for t in ("gathers", "scatters", "MB grads", "MB whole", "ms", "time")
    )
    print(f"{'option':25}{titles}")
    first = seconds["neither"]
    for name, own in seconds.items():
        gathers = sum(n for op, n in traffic[name].items() if "allgather_base" in op)
        scatters = sum(n for op, n in traffic[name].items() if "reduce_scatter" in op)
        ratio = statistics.median(a / b for a, b in zip(own, first, strict=True))
        grads, whole = (value / 2**20 for value in memory[name])
        print(
            f"{name:25}{gathers:9}{scatters:9}{grads:9.1f}{whole:9.1f}"
            f"{statistics.median(own) * 1e3:9.1f}{ratio:8.2f}x"
        )


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    print(machine())
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe()
    processes = [context.Process(target=work, args=(r, ends[r], count)) for r in range(SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
