"""A range test of several ranks: one reading, one stop, and nothing left changed on any."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from distributed.loops import loss
from distributed.models import WRAPPINGS, Batch, batches, plain_model, weights
from distributed.processes import outcomes_of, run
from torch import Tensor, nn

import midstep as ms

pytestmark = pytest.mark.distributed

SIZE = 2


class Dropping(nn.Module):
    """The plain model behind dropout, so that ranks draw."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = plain_model()
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_seen += len(inputs)
        return self.layers(nn.functional.dropout(inputs, 0.1, self.training))


def data_of(rank: int) -> list[Batch]:
    """Learnable batches, as many on each rank but of unequal rows."""
    found = []
    for inputs, _ in batches(24, seed=rank):
        rows = inputs.repeat(4, 1) + 0.1 * torch.randn(
            4 * len(inputs), 6, generator=torch.Generator().manual_seed(rank), dtype=inputs.dtype
        )
        found.append((rows, rows[:, :4].argmax(1)))
    return found


def trained(wrapping: str, rank: int) -> tuple[ms.Updater, list[Batch]]:
    torch.manual_seed(100 + rank)
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002 - the global one is what is put back
    model = Dropping() if wrapping == "DDP" else plain_model()
    wrapped = WRAPPINGS[wrapping](model)
    torch.manual_seed(100 + rank)
    updater = ms.Updater(
        wrapped.model,
        torch.optim.AdamW(wrapped.model.parameters(), lr=0.01),
        clip=ms.Chain(ms.ByGlobalNorm(1.0), ms.ByQuantile(0.9, warmup=2)),
        schedule=ms.schedules.cosine(total=100, warmup=4),
    )
    data = data_of(rank)
    for window in updater.windows(data[:8], size=SIZE, count=ms.targets()):
        updater.update(window, loss)
    return updater, data


def everything(updater: ms.Updater) -> list[Any]:
    """All that a range test touches on this rank, as plain values."""
    optimizer = updater.optimizer.state_dict()
    state = [
        (name, _local(value) if isinstance(value, Tensor) else value)
        for slots in optimizer["state"].values()
        for name, value in slots.items()
    ]
    return copy.deepcopy(
        [
            [_local(p) for p in updater.model.parameters()],
            [None if p.grad is None else _local(p.grad) for p in updater.model.parameters()],
            [b.tolist() for b in updater.model.buffers()],
            [m.training for m in updater.model.modules()],
            state,
            optimizer["param_groups"],
            repr(updater.state_dict()),
            torch.get_rng_state().tolist(),
            random.getstate(),
            str(np.random.get_state()),  # noqa: NPY002
        ]
    )


def _local(tensor: Tensor) -> bytes:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().numpy().tobytes()


def swept(updater: ms.Updater, data: list[Batch], **other: Any) -> Any:
    given = {"start_lr": 1e-5, "num_updates": 40, "size": SIZE, "count": ms.targets()} | other
    return ms.lr_range(updater, data, given.pop("loss", loss), **given)


def sweep_twice(rank: int, size: int, wrapping: str) -> Any:
    del size
    updater, data = trained(wrapping, rank)
    before = everything(updater)
    found = swept(updater, data, repeats=2)
    same = before == everything(updater)
    after = [updater.update(w, loss).loss_mean for w in updater.windows(data, size=SIZE)]
    return found.to_json(), same, after, weights(updater.model)


@pytest.mark.parametrize("wrapping", ["DDP", "FSDP2"])
def test_all_ranks_read_the_same_and_go_on_as_if_nothing_had_been(wrapping: str) -> None:
    (one, *first), (other, *second) = run(sweep_twice, wrapping, size=2)
    assert one == other
    assert first[0]
    assert second[0]
    assert first[1] == second[1]  # losses of all ranks
    assert all(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))


def one_process(rank: int, size: int) -> Any:
    """The same data on one rank: each window holds what the two ranks' windows held together."""
    del rank, size
    wrapped = WRAPPINGS["DDP"](plain_model())
    updater = ms.Updater(wrapped.model, torch.optim.SGD(wrapped.model.parameters(), lr=0.1))
    return _curve(updater, _joined())


def two_processes(rank: int, size: int) -> Any:
    del size
    wrapped = WRAPPINGS["DDP"](plain_model())
    updater = ms.Updater(wrapped.model, torch.optim.SGD(wrapped.model.parameters(), lr=0.1))
    return _curve(updater, data_of(rank))


def _joined() -> list[Batch]:
    pairs = zip(data_of(0), data_of(1), strict=True)
    return [(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in pairs]


def _curve(updater: ms.Updater, data: list[Batch]) -> list[float]:
    return list(swept(updater, data).curves[0].loss_mean)


def test_the_losses_are_those_of_all_ranks() -> None:
    alone = run(one_process, size=1)[0]
    for losses in run(two_processes, size=2):
        assert losses == pytest.approx(alone, abs=1e-9)


def break_on_one(rank: int, size: int, kind: str) -> Any:
    """From the thirteenth window on, rank 1 alone has a loss, or a gradient, that is not finite."""
    del size
    updater, data = trained("DDP", rank)
    before = everything(updater)
    calls = 0

    def breaking(model: Any, batch: Batch) -> ms.LossSum:
        nonlocal calls
        calls += 1
        value = loss(model, batch)
        if rank == 1 and calls > 12 * SIZE:
            if kind == "loss":
                return ms.LossSum(value.sum * math.inf, value.count)
            value.sum.register_hook(lambda gradient: gradient * math.nan)
        return value

    found = swept(updater, data, loss=breaking)
    return found.to_json(), [len(c.lr) for c in found.curves], before == everything(updater)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_what_breaks_on_one_rank_stops_all_of_them_at_that_point(kind: str) -> None:
    (one, *first), (other, *second) = run(break_on_one, kind, size=2)
    assert one == other
    assert first == second == [[13], True]


def fail_on_one(rank: int, size: int) -> None:
    del size
    updater, data = trained("DDP", rank)
    before = everything(updater)
    calls = 0

    def failing(model: Any, batch: Batch) -> ms.LossSum:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 9:
            raise RuntimeError("the data of this rank is gone")
        return loss(model, batch)

    try:
        swept(updater, data, loss=failing)
    except Exception as error:
        error.is_restored = before == everything(updater)  # type: ignore[attr-defined]
        raise


def test_an_error_on_one_rank_ends_the_test_on_all_and_everything_is_put_back() -> None:
    waiting, failed = outcomes_of(fail_on_one, size=2)
    assert (failed.error, failed.message) == ("RuntimeError", "the data of this rank is gone")
    assert waiting.error == "RankFailure"
    assert "Rank 1" in waiting.message
    assert failed.details["is_restored"]
    assert waiting.details["is_restored"]
