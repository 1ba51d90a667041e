"""Ranks that must hold the same weights are compared, and one that drifted is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.loops import LOOPS
from distributed.models import WRAPPINGS, batches, plain_model
from distributed.processes import run
from torch import Tensor
from torch.distributed.tensor import DTensor

import midstep as ms
from midstep.errors import ReplicaDrift

pytestmark = pytest.mark.distributed


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def drift(rank: int, size: int, kind: str, drifting: tuple[int, ...], every: int) -> Any:
    """After the second update some ranks' weights change in their last bit."""
    del size
    wrapped = WRAPPINGS[kind](plain_model())
    updater = ms.Updater(
        wrapped.model,
        torch.optim.SGD(wrapped.model.parameters(), lr=0.1),
        check_replicas_every=every,
        empty=ms.Skip(),
    )
    world = updater._ranks.world
    before, costs = world.num_collectives, []
    data = [(x, y.clamp(min=0)) for x, y in batches(12, seed=wrapped.data_rank)]
    try:
        for record in LOOPS["loop, streamed"](updater, data):
            costs.append(world.num_collectives - before)
            before = world.num_collectives
            if record.step == 2 and rank in drifting:
                with torch.no_grad():
                    weight = local(next(iter(wrapped.model.parameters()))).view(-1)
                    weight[0] = torch.nextafter(weight[0], weight[0] + 1.0)
    except ReplicaDrift as error:
        return error.ranks, error.parameter, str(error), updater.clock.step
    return costs


@pytest.mark.parametrize(
    ("kind", "drifting", "named"),
    [
        ("DDP", (2,), [2]),
        ("DDP", (0,), [0]),
        ("DDP", (1, 3), [1, 3]),  # two against two: no majority
        ("HSDP", (1,), [3]),  # its only twin is rank 3: no majority, so the lower counts
        ("TP", (), None),
        ("FSDP2", (), None),
        ("HSDP", (), None),
        ("FSDP2 x TP", (), None),
    ],
)
def test_a_rank_that_drifted_is_named_on_all_ranks(
    kind: str, drifting: tuple[int, ...], named: list[int] | None
) -> None:
    results = run(drift, kind, drifting, 3, size=4)
    if named is None:
        for costs in results:
            # One gather more in every third update, and nothing was found.
            assert [cost - costs[1] for cost in costs[1:]] == [0, 1, 0, 0, 1]
        return
    assert all(result == results[0] for result in results)
    ranks, parameter, message, step = results[0]
    assert ranks == named
    assert parameter == "0.weight"
    assert step == 3
    assert ("no majority" in message) == (len(drifting) == 2 or kind == "HSDP")


def never(rank: int, size: int) -> int:
    del size
    wrapped = WRAPPINGS["DDP"](plain_model())
    with torch.no_grad():
        wrapped.model.module[0].weight += rank
    updater = ms.Updater(wrapped.model, torch.optim.SGD(wrapped.model.parameters(), lr=0.1))
    data = [(x, y.clamp(min=0)) for x, y in batches(4, seed=rank)]
    return len(list(LOOPS["update"](updater, data)))


def test_nothing_is_compared_unless_asked_for() -> None:
    assert run(never, size=2) == [2, 2]
