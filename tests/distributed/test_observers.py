"""Observers on several ranks: norms of whole tensors, one small collective, or a clear refusal."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from distributed.models import WRAPPINGS, plain_model
from distributed.processes import run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import midstep as ms
from midstep.observers import (
    Entries,
    GradNorms,
    Memory,
    Microbatches,
    Moments,
    NoiseScale,
    Stages,
    Updates,
)

pytestmark = pytest.mark.distributed

ROWS = torch.linspace(-2.0, 2.0, 72, dtype=torch.float64).view(12, 6)
BY_TENSOR = [Entries, GradNorms, Moments, Updates]


def norm(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor.double()).item()


def loss(model: Any, x: Tensor) -> Tensor:
    return model(x).square().sum()


def parts_of(data_rank: int, data_size: int) -> list[Tensor]:
    rows = ROWS.tensor_split(data_size)[data_rank]
    return [rows[:1], rows[1:]]


def observed(rank: int, size: int, kind: str) -> dict[str, Any]:
    del rank, size
    wrapped = WRAPPINGS[kind](plain_model())
    model = wrapped.model
    updater = ms.Updater(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        clip=ms.ByGlobalNorm(0.1),
        observers=[observer() for observer in BY_TENSOR] + [Memory(), Stages()],
    )
    microbatches = parts_of(wrapped.data_rank, wrapped.data_size)
    start = updater._ranks.world.num_collectives
    record = updater.update(microbatches, loss, count=ms.rows())
    observing = updater._ranks.world.num_collectives - start
    plain = ms.Updater(model, torch.optim.AdamW(model.parameters()), clip=ms.ByGlobalNorm(0.1))
    start = plain._ranks.world.num_collectives
    plain.update(microbatches, loss, count=ms.rows())
    return {
        "extra": dict(record.extra),
        "collectives": observing - (plain._ranks.world.num_collectives - start),
    }


def expected() -> dict[str, Any]:
    """One process, one batch, plain torch."""
    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    (loss(model, ROWS) / len(ROWS)).backward()
    names = [name for name, _ in model.named_parameters()]
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    total = math.hypot(*(norm(g) for g in grads.values()))
    for p in model.parameters():
        p.grad.mul_(min(1.0, 0.1 / total))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.step()
    moved = {n: norm(p.detach() - before[n]) for n, p in model.named_parameters()}
    largest = max(names, key=lambda n: grads[n].abs().max())
    zeros = {n: (g == 0).double().mean().item() for n, g in grads.items()}
    count = sum(g.numel() for g in grads.values())
    return {
        "clip_max_norm": 0.1,
        "grad_norms": {n: norm(g) for n, g in grads.items()},
        "grad_norms_by_group": [total],
        "grad_largest": grads[largest].abs().max().item(),
        "grad_largest_in": largest,
        "grad_zeros": sum(zeros[n] * grads[n].numel() for n in names) / count,
        "grad_zeros_by_tensor": zeros,
        "update_norm": math.hypot(*moved.values()),
        "update_norms": moved,
        "weight_norms": {n: norm(w) for n, w in before.items()},
        "update_to_weight": {n: moved[n] / norm(before[n]) for n in names},
        "naive_update_norm": 0.01 * min(0.1, total),
        "moments": {
            n: {
                "first": norm(optimizer.state[p]["exp_avg"]),
                "second": optimizer.state[p]["exp_avg_sq"].mean().item(),
            }
            for n, p in model.named_parameters()
        },
    }


@pytest.mark.parametrize("kind", WRAPPINGS)
def test_numbers_by_tensor_are_those_of_the_whole_tensor_on_every_rank(kind: str) -> None:
    wanted = expected()
    for found in run(observed, kind, size=4):
        extra = found["extra"]
        assert extra.pop("memory_bytes") > 0
        assert len(extra.pop("stage_seconds")) == 5
        assert len(extra.pop("decay_exponent")) == 1
        assert extra.keys() == wanted.keys()
        assert extra["grad_largest_in"] == wanted["grad_largest_in"]
        for name, value in wanted.items():
            if name == "moments":
                for tensor, moments in value.items():
                    assert extra[name][tensor] == pytest.approx(moments, rel=1e-9), tensor
            elif name != "grad_largest_in":
                assert extra[name] == pytest.approx(value, rel=1e-9), name
        assert found["collectives"] == (0 if kind == "DDP" else 1)


def trained(rank: int, size: int, *, watches: bool) -> tuple[list[Tensor], list[float | None]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 3)).double()
    updater = ms.Updater(
        DistributedDataParallel(model),
        torch.optim.AdamW(model.parameters(), lr=0.01),
        clip=ms.ByGlobalNorm(0.1),
        observers=[GradNorms()] if watches else [],
    )
    norms = [
        updater.update(parts_of(rank, size), loss, count=ms.rows()).grad_norm for _ in range(30)
    ]
    return [p.detach() for p in model.parameters()], norms


def trained_twice(rank: int, size: int) -> list[tuple[list[Tensor], list[float | None]]]:
    return [trained(rank, size, watches=watches) for watches in (False, True)]


@pytest.mark.parametrize("size", [2, 3])
def test_training_is_the_same_bit_for_bit_whether_or_not_norms_by_tensor_are_asked_for(
    size: int,
) -> None:
    for (weights, norms), (watched_weights, watched_norms) in run(trained_twice, size=size):
        assert norms == watched_norms
        assert all(torch.equal(a, b) for a, b in zip(weights, watched_weights, strict=True))


SHARES = ((0, 3, 5), (5, 6, 12))  # two microbatches each, unequal


def tapped(rank: int, size: int) -> dict[str, Any]:
    del size
    model = DistributedDataParallel(plain_model())
    updater = ms.Updater(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        observers=[Microbatches(), NoiseScale(unit="rows")],
    )
    start, middle, end = SHARES[rank]
    found = {}
    for _ in range(2):
        before = updater._ranks.world.num_collectives
        batches = [ROWS[start:middle], ROWS[middle:end]]
        record = updater.update(batches, loss, count=ms.rows())
        found = dict(record.extra)
        found["collectives"] = updater._ranks.world.num_collectives - before
    return found


def test_under_ddp_each_rank_has_its_own_microbatches_and_all_one_noise_scale() -> None:
    ends = [(start, end) for share in SHARES for start, end in itertools.pairwise(share)]
    own = []
    for start, end in ends:
        model = plain_model()
        (loss(model, ROWS[start:end]) / (end - start)).backward()
        own.append([p.grad for p in model.parameters()])
    model = plain_model()
    (loss(model, ROWS) / len(ROWS)).backward()
    squares = [sum(norm(g) ** 2 for g in grads) for grads in own]
    whole = sum(norm(p.grad) ** 2 for p in model.parameters())
    between = sum((e - s) * q for (s, e), q in zip(ends, squares, strict=True)) - 12 * whole
    trace = between / 3
    scale = trace / (whole - trace / 12)
    for rank, found in enumerate(run(tapped, size=2)):
        wanted = [math.sqrt(q) for q in squares[2 * rank : 2 * rank + 2]]
        assert found["microbatch_grad_norms"] == pytest.approx(wanted, rel=1e-9)
        assert found["noise_scale"] == pytest.approx(scale, rel=1e-9)
        assert found["noise_scale_unit"] == "rows"
        assert found["collectives"] == 3  # opening, norm, noise


def refused(rank: int, size: int, kind: str) -> list[str]:
    del rank, size
    model = WRAPPINGS[kind](plain_model()).model
    messages = []
    for observer in (Microbatches(), NoiseScale()):
        with pytest.raises(NotImplementedError) as caught:
            ms.Updater(model, torch.optim.SGD(model.parameters()), observers=[observer])
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("kind", ["FSDP2", "TP"])
def test_microbatches_of_split_parameters_are_refused_on_every_rank(kind: str) -> None:
    for microbatches, noise in run(refused, kind, size=2):
        assert "`Microbatches()` with parameters that lie in parts" in microbatches
        assert "`NoiseScale()`" in noise


def experts(rank: int, size: int) -> list[str]:
    del size
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model._ddp_params_and_buffers_to_ignore = ["1.weight", "1.bias"]
    wrapped = DistributedDataParallel(model)
    messages = []
    for observer in (Entries(), Moments(), Updates(), Microbatches(), NoiseScale()):
        with pytest.raises(NotImplementedError) as caught:
            ms.Updater(wrapped, torch.optim.SGD(wrapped.parameters()), observers=[observer])
        messages.append(str(caught.value))
    return messages


def test_parameters_of_one_rank_alone_are_refused() -> None:
    for messages in run(experts, size=2):
        assert len(messages) == 5
        assert all("own" in message for message in messages)
