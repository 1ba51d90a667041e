"""Inf and nan on one rank: one verdict on all, and the microbatch and rank that brought them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from distributed.loops import SIZE, stepped
from distributed.models import (
    WRAPPINGS,
    Batch,
    batches,
    gradients,
    oracle,
    plain_model,
    weights,
    worst,
)
from distributed.processes import run
from torch import Tensor

import midstep as ms

pytestmark = pytest.mark.distributed


class Poison(torch.autograd.Function):
    """Passes its input on; the gradient that comes back is nan in one entry."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:  # noqa: ARG004 - torch's own
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004 - torch's own
        grad = grad.clone()
        grad.view(-1)[0] = float("nan")
        return grad


def own_loss(model: Any, batch: Any) -> ms.LossSum:
    """The loss of a batch; one whose first input is 7 gives a finite loss and a nan gradient."""
    outputs = model(batch[0])
    if batch[0][0, 0] == 7.0:
        outputs = Poison.apply(outputs)
    return ms.cross_entropy(outputs, batch[1])


def data_of(part: int, *, bad: tuple[int, int] | None = None, kind: str = "") -> list[Batch]:
    """Batches with targets everywhere; of part and position `bad` one is spoiled."""
    found = [(x, y.clamp(min=0)) for x, y in batches(6 - part, seed=part)]
    if bad is not None and bad[0] == part:
        inputs, labels = found[bad[1]]
        inputs = inputs.clone()
        inputs[0, 0] = 7.0 if kind == "gradient" else float("inf")
        found[bad[1]] = (inputs, labels)
    return found


@dataclasses.dataclass(frozen=True)
class Way:
    """How a window is run, and what is wrong in it."""

    door: str
    kind: str
    every_microbatch: bool
    position: int


def pass_over(updater: ms.Updater, data: list[Batch], door: str) -> None:
    for window in updater.windows(data, size=3, count=ms.targets()):
        if door == "update":
            updater.update(window, own_loss)
            continue
        for batch in window:
            with window.forward():
                value = own_loss(updater.model, batch)
            window.backward(value)
        window.step()


def raise_them(rank: int, size: int, wrapping: str, ways: list[Way]) -> dict[Way, Any]:
    del rank, size
    found = {}
    for way in ways:
        wrapped = WRAPPINGS[wrapping](plain_model())
        updater = ms.Updater(
            wrapped.model,
            torch.optim.AdamW(wrapped.model.parameters(), lr=0.01),
            nonfinite=ms.Raise(every_microbatch=way.every_microbatch),
        )
        before = weights(wrapped.model)
        bad = (wrapped.data_size - 1, way.position)
        data = data_of(wrapped.data_rank, bad=bad, kind=way.kind)
        with pytest.raises(ms.NonFiniteGradient) as caught:
            pass_over(updater, data, way.door)
        error = caught.value
        found[way] = {
            "microbatch": error.microbatch,
            "rank": error.rank,
            "parameters": error.parameters,
            "message": str(error),
            "untouched": worst(before, weights(wrapped.model)) == 0.0,
            "step": updater.clock.step,
        }
    return found


WAYS = [
    Way(*way, position)
    for way in (
        ("update", "loss", False),
        ("update", "gradient", False),
        ("update", "gradient", True),
        ("loop", "loss", False),
        ("loop", "gradient", True),
    )
    for position in range(3)
]


@pytest.mark.parametrize("wrapping", ["DDP", "FSDP2"])
def test_every_rank_raises_the_same_error_and_it_names_the_culprit(wrapping: str) -> None:
    results = run(raise_them, wrapping, WAYS, size=3)
    assert all(result == results[0] for result in results)
    for way, found in results[0].items():
        assert (found["microbatch"], found["rank"]) == (way.position, 2), way
        assert f"microbatch {way.position} of the window (from 0) on rank 2" in found["message"]
        # A nan in one of four outputs' gradients; an infinite input spoils all of them.
        num = 1 if way.kind == "gradient" else 4
        assert found["parameters"]["4.bias"] == num
        assert found["parameters"]["4.weight"] == 8 * num
        assert found["untouched"]
        assert found["step"] == 0


@pytest.mark.parametrize("wrapping", ["HSDP", "TP", "FSDP2 x TP"])
def test_so_it_is_where_tensors_are_split_and_copied(wrapping: str) -> None:
    ways = [Way("update", "gradient", False, 1), Way("loop", "gradient", True, 1)]
    results = run(raise_them, wrapping, ways, size=4)
    assert all(result == results[0] for result in results)
    for found in results[0].values():
        assert found["microbatch"] == 1
        # Ranks that see the same data know it alike; the first of them is named.
        assert found["rank"] == {"HSDP": 3, "TP": 0, "FSDP2 x TP": 2}[wrapping]
        assert found["parameters"]["4.weight"] == 8


def skip_it(rank: int, size: int, wrapping: str, streamed: bool) -> Any:
    """One bad batch, then windows in which the rank that had it has none."""
    del rank, size
    wrapped = WRAPPINGS[wrapping](plain_model())
    updater = ms.Updater(
        wrapped.model,
        torch.optim.AdamW(wrapped.model.parameters(), lr=0.01, weight_decay=0.1),
        nonfinite=ms.Skip(max_consecutive=2),
    )
    data = skip_data(wrapped.data_size)[wrapped.data_rank]
    verdicts, found = [], []
    count = None if streamed else ms.targets()
    for window in updater.windows(data, size=SIZE, count=count):
        record = stepped(updater, window)
        verdicts.append((record.verdict.value, record.num_nonfinite, record.step))
        if record.applied:
            found.append((gradients(wrapped.model), weights(wrapped.model)))
    return verdicts, found


def skip_data(data_size: int) -> list[list[Batch]]:
    last = data_size - 1
    whole = [[(x, y.clamp(min=0)) for x, y in batches(8, seed=r)] for r in range(data_size)]
    inputs, labels = whole[last][3]
    whole[last] = [*whole[last][:3], (inputs * float("nan"), labels)]
    return whole


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("wrapping", ["DDP", "FSDP2"])
def test_all_ranks_skip_alike_and_the_next_windows_are_exact(wrapping: str, streamed: bool) -> None:
    results = run(skip_it, wrapping, streamed, size=2)
    parts = skip_data(2)
    wanted = oracle([part[:SIZE] + part[2 * SIZE :] for part in parts], size=SIZE)
    assert results[0][0] == results[1][0]
    assert [verdict for verdict, _, _ in results[0][0]] == [
        "applied",
        "skipped_nonfinite",
        "applied",
        "applied",
    ]
    for _, found in results:
        assert len(found) == len(wanted)
        for (grads, after), step in zip(found, wanted, strict=True):
            assert worst(grads, step.gradients) < 1e-12
            assert worst(after, step.weights) < 1e-12


def overflow(rank: int, size: int, wrapping: str) -> list[tuple[str, float]]:
    """Half precision in which the gradient of one rank's batch alone overflows at first."""
    del size
    wrapped = WRAPPINGS[wrapping](plain_model(torch.float32))
    updater = ms.Updater(
        wrapped.model,
        torch.optim.SGD(wrapped.model.parameters(), lr=0.0),
        precision=ms.FP16(init_scale=2.0**14),
    )
    inputs = torch.ones(1, 6) * (1.0 if rank == 0 else 100.0)
    rows = []
    for window in updater.windows([inputs] * 6, size=1, count=ms.rows()):
        record = updater.update(window, lambda m, x: m(x).float().square().sum())
        rows.append((record.verdict.value, record.loss_scale))
    return [*rows, ("end", updater.loss_scale.value)]


@pytest.mark.parametrize("wrapping", ["DDP", "FSDP2"])
def test_an_overflow_on_one_rank_lowers_the_scale_on_all(wrapping: str) -> None:
    results = run(overflow, wrapping, size=2)
    assert all(result == results[0] for result in results)
    verdicts = [verdict for verdict, _ in results[0][:-1]]
    assert verdicts[0] == "skipped_nonfinite"
    assert verdicts[-1] == "applied"
    scales = [scale for _, scale in results[0]]
    for verdict, scale, after in zip(verdicts, scales, scales[1:], strict=False):
        assert after == (scale / 2 if verdict == "skipped_nonfinite" else scale)
