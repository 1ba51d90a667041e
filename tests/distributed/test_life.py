"""Several updaters in a process, one rank alone, threads that end, and a clean exit."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from distributed.loops import LOOPS, SIZE
from distributed.models import (
    WRAPPINGS,
    batches,
    gradients,
    oracle,
    plain_model,
    weights,
    worst,
)
from distributed.processes import run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import midstep as ms

pytestmark = pytest.mark.distributed


def alone(rank: int, size: int, kind: str) -> Any:
    del rank, size
    wrapped = WRAPPINGS[kind](plain_model())
    optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=0.01, weight_decay=0.1)
    updater = ms.Updater(wrapped.model, optimizer, clip=ms.ByGlobalNorm(0.5))
    data = [(x, y.clamp(min=0)) for x, y in batches(5, seed=0)]
    rows = [
        (gradients(wrapped.model), weights(wrapped.model))
        for _ in LOOPS["loop, streamed"](updater, data)
    ]
    return rows, updater._ranks.world.num_collectives, threading.active_count()


@pytest.mark.parametrize("kind", ["DDP", "FSDP2", "TP"])
def test_one_rank_alone_trains_as_without_ranks_and_talks_to_nobody(kind: str) -> None:
    wanted = oracle([[(x, y.clamp(min=0)) for x, y in batches(5, seed=0)]], size=SIZE, max_norm=0.5)
    ((rows, num_collectives, num_threads),) = run(alone, kind, size=1)
    for (grads, after), step in zip(rows, wanted, strict=True):
        assert worst(grads, step.gradients) < 1e-12
        assert worst(after, step.weights) < 1e-12
    assert num_collectives == 0
    assert num_threads == 1


class Pair:
    """A generator and a critic, as one process has them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = nn.Linear(2, 3).double()
        self.critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def noise(rank: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(2, 2, generator=generator, dtype=torch.float64) for _ in range(count)]


def critic_loss(critic: nn.Module, generator: nn.Module, z: Tensor) -> Tensor:
    return (critic(generator(z).detach()) - critic(torch.ones_like(z[:, :1]).expand(2, 3))).sum()


def generator_loss(critic: nn.Module, generator: nn.Module, z: Tensor) -> Tensor:
    return -critic(generator(z)).tanh().sum()


COUNTS = (4, 2)


def two_updaters(rank: int, size: int) -> Any:
    del size
    pair = Pair()
    generator = DistributedDataParallel(pair.generator)
    critic = DistributedDataParallel(pair.critic)
    for_critic = ms.Updater(critic, torch.optim.Adam(critic.parameters(), lr=0.01))
    for_generator = ms.Updater(generator, torch.optim.Adam(generator.parameters(), lr=0.01))
    data = noise(rank, COUNTS[rank])
    windows = zip(
        for_critic.windows(data, size=2, count=ms.rows()),
        for_generator.windows(data, size=1, count=ms.rows()),
        strict=False,
    )
    for first, second in windows:
        for_critic.update(first, lambda m, z: critic_loss(m, pair.generator, z))
        pair.critic.requires_grad_(False)
        for_generator.update(second, lambda m, z: generator_loss(pair.critic, m, z))
        pair.critic.requires_grad_(True)
    return weights(generator) + weights(critic), for_generator.clock.step


def test_two_updaters_take_turns_on_two_ranks() -> None:
    pair = Pair()
    first = torch.optim.Adam(pair.critic.parameters(), lr=0.01)
    second = torch.optim.Adam(pair.generator.parameters(), lr=0.01)
    data = [noise(rank, COUNTS[rank]) for rank in range(2)]
    for index in range(2):
        window = [z for part in data for z in part[2 * index : 2 * index + 2]]
        first.zero_grad()
        total = sum(map(len, window))
        sum(critic_loss(pair.critic, pair.generator, z) / total for z in window).backward()
        first.step()
        window = [part[index] for part in data]
        second.zero_grad()
        sum(generator_loss(pair.critic, pair.generator, z) / 4 for z in window).backward()
        second.step()
    for found, steps in run(two_updaters, size=2):
        assert steps == 2
        assert worst(found, weights(pair.generator) + weights(pair.critic)) < 1e-12


def many_updaters(rank: int, size: int) -> list[int]:
    del size
    counts = [threading.active_count()]
    for _ in range(5):
        wrapped = WRAPPINGS["DDP"](plain_model())
        updater = ms.Updater(wrapped.model, torch.optim.SGD(wrapped.model.parameters(), lr=0.1))
        list(LOOPS["update"](updater, batches(2, seed=rank)))
        counts.append(threading.active_count())
        del updater, wrapped
        gc.collect()
    return [*counts, threading.active_count()]


def test_the_thread_of_an_updater_ends_with_it() -> None:
    for first, *during, last in run(many_updaters, size=2):
        assert last == first
        assert max(during) == min(during)


# Forked once torch is there, which takes longer than all the rest; each ends as interpreters do.
EXIT = """
import datetime, os, sys, torch, torch.distributed as dist
import midstep as ms
import midstep.ranks.opening, midstep.ranks.sharing, midstep.updater

path = sys.argv[1]
cases = [(ends, rank) for ends in ("destroyed", "inside") for rank in range(2)]
children = {}
for ends, rank in cases:
    pid = os.fork()
    if pid == 0:
        break
    children[pid] = ends, rank
else:
    for pid, case in children.items():
        print(*case, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    sys.exit()
store = dist.FileStore(f"{path}-{ends}", 2)
dist.init_process_group(
    "gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1))
for window in updater.windows([torch.ones(1, 2)] * 3, size=1, count=ms.rows()):
    if ends == "inside":
        break
    updater.update(window, lambda m, x: m(x).sum())
dist.barrier()
if ends == "destroyed":
    dist.destroy_process_group()
"""


def test_the_interpreter_ends_cleanly_with_an_updater_alive(tmp_path: Any) -> None:
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXIT, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert process.stderr == ""
    assert process.stdout.split("\n")[:-1] == [
        f"{ends} {rank} 0" for ends in ("destroyed", "inside") for rank in range(2)
    ]
