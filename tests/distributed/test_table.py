"""Every kind of parallel, every unevenness: the gradient of one process, and its next weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import midstep as ms
from distributed.models import WRAPPINGS, batches, gradients, oracle, plain_model, weights, worst
from distributed.processes import run

SIZE = 4
MAX_NORM = 0.5
# Batches by rank, of which a window takes four each.
LOADS = {
    "equal": (8, 8, 8, 8),
    "uneven": (7, 5, 6, 8),
    "empty rank": (0, 7, 3, 5),
    "tail": (6, 9, 12, 1),
}


def loss(model: Any, batch: Any) -> ms.LossSum:
    return ms.cross_entropy(model(batch[0]), batch[1])


def first_door(updater: ms.Updater, data: Any) -> Any:
    for window in updater.windows(data, size=SIZE, count=ms.targets()):
        yield updater.update(window, loss)


def second_door(updater: ms.Updater, data: Any) -> Any:
    for window in updater.windows(data, size=SIZE):
        for batch in window:
            with window.forward():
                loss_sum = loss(updater.model, batch)
            window.backward(loss_sum)
        yield window.step()


def counted_second_door(updater: ms.Updater, data: Any) -> Any:
    for window in updater.windows(data, size=SIZE, count=ms.targets()):
        for batch in window:
            with window.forward():
                loss_sum = loss(updater.model, batch)
            window.backward(loss_sum)
        yield window.step()


DOORS = {"update": first_door, "streamed": second_door, "counted": counted_second_door}


def train(rank: int, size: int, kind: str, load: str, door: str) -> list[dict[str, Any]]:
    wrapped = WRAPPINGS[kind](plain_model())
    optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=0.01, weight_decay=0.1)
    updater = ms.Updater(
        wrapped.model, optimizer, clip=ms.ByGlobalNorm(MAX_NORM), empty=ms.Skip()
    )
    data = batches(LOADS[load][wrapped.data_rank], seed=wrapped.data_rank)
    rows = []
    for record in DOORS[door](updater, data):
        if record.applied:
            rows.append(
                {
                    "gradients": gradients(wrapped.model),
                    "weights": weights(wrapped.model),
                    "record": record,
                    "size": wrapped.data_size,
                }
            )
    return rows


@pytest.mark.distributed
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("kind", WRAPPINGS)
def test_the_gradient_and_the_next_weights_are_those_of_one_process(
    kind: str, load: str, door: str
) -> None:
    results = run(train, kind, load, door, size=4)
    data_size = results[0][0]["size"]
    parts = [batches(LOADS[load][r], seed=r) for r in range(data_size)]
    wanted = oracle(parts, size=SIZE, max_norm=MAX_NORM)
    for rows in results:
        assert len(rows) == len(wanted)
        for row, step in zip(rows, wanted, strict=True):
            assert worst(row["gradients"], step.gradients) < 1e-12
            assert worst(row["weights"], step.weights) < 1e-12
            record = row["record"]
            assert record.grad_norm == pytest.approx(step.grad_norm, rel=1e-12)
            assert record.loss_mean == pytest.approx(step.loss_mean, rel=1e-12)
            assert record.denominators == {"loss": step.denominator}
            assert record.num_microbatches == step.num_microbatches
