"""What cannot be added up is refused when the updater is made, on every rank, in clear words."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from distributed.models import ddp_and_tensor_parallel, plain_model
from distributed.processes import run
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import midstep as ms

pytestmark = pytest.mark.distributed


def make(model: nn.Module, sharding: ms.Sharding | None = None) -> ms.Updater:
    return ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), sharding=sharding)


def flat() -> None:
    warnings.simplefilter("ignore")  # FSDP1 says itself that it is old
    make(FullyShardedDataParallel(plain_model(), device_id=torch.device("cpu")))


def plain() -> None:
    make(plain_model())


def static() -> None:
    make(DistributedDataParallel(plain_model(), static_graph=True))


def both() -> None:
    make(ddp_and_tensor_parallel(plain_model()).model)


def inside() -> None:
    model = plain_model()
    model[0] = DistributedDataParallel(model[0])
    make(model)


def nothing_sharded() -> None:
    make(DistributedDataParallel(plain_model()), ms.Sharding(keep_gathered=True))


CASES: dict[str, tuple[Callable[[], None], str, str]] = {
    "FSDP1": (flat, "NotImplementedError", "wrapped in FSDP1"),
    "plain": (plain, "ValueError", "2 ranks and a plain `Sequential`"),
    "static graph": (static, "NotImplementedError", "`static_graph=True`"),
    "DDP x TP": (both, "NotImplementedError", "DDP over a tensor-parallel model"),
    "DDP inside": (inside, "NotImplementedError", "parts of the `Sequential` are wrapped in DDP"),
    "sharding": (nothing_sharded, "ValueError", "is not sharded by `fully_shard`"),
}


def refused(rank: int, size: int, names: list[str]) -> list[tuple[str, str]]:
    del rank, size
    found = []
    for name in names:
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            CASES[name][0]()
        found.append((type(caught.value).__name__, str(caught.value)))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_it_is_refused_on_every_rank(size: int) -> None:
    names = [name for name in CASES if (name == "DDP x TP") == (size == 4)]
    for found in run(refused, names, size=size):
        for name, (kind, said) in zip(names, found, strict=True):
            _, error, message = CASES[name]
            assert kind == error, name
            assert message in said, name


@pytest.mark.parametrize("every", [0, -1, True])
def test_a_number_of_updates_below_one_is_refused(every: int) -> None:
    model = plain_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="check_replicas_every"):
        ms.Updater(model, optimizer, check_replicas_every=every)
