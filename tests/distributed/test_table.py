"""Every kind of parallel, every unevenness: the gradient of one process, and its next weights."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from distributed.loops import LOOPS, SIZE
from distributed.models import (
    WRAPPINGS,
    Batch,
    Step,
    autocast_oracle,
    batches,
    ddp_and_tensor_parallel,
    gradients,
    oracle,
    plain_model,
    weights,
    worst,
)
from distributed.processes import run

import midstep as ms

pytestmark = pytest.mark.distributed

MAX_NORM = 0.5
# Batches by rank, of which a window takes four each.
LOADS = {
    "equal": (8, 8, 8, 8),
    "uneven": (7, 5, 6, 8),
    "empty rank": (7, 0, 3, 5),
    "tail": (6, 9, 12, 1),
}
KINDS = {**WRAPPINGS, "DDP x TP": ddp_and_tensor_parallel}


def train(
    rank: int, size: int, kind: str, dtype: torch.dtype, precision: ms.FP16 | None
) -> dict[tuple[str, str], Any]:
    del rank, size
    found = {}
    for load, counts in LOADS.items():
        for door, loop in LOOPS.items():
            wrapped = KINDS[kind](plain_model(dtype))
            optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=0.01, weight_decay=0.1)
            updater = ms.Updater(
                wrapped.model,
                optimizer,
                clip=ms.ByGlobalNorm(MAX_NORM),
                precision=precision,
                empty=ms.Skip(),
            )
            data = batches(counts[wrapped.data_rank], seed=wrapped.data_rank, dtype=dtype)
            found[load, door] = [
                (gradients(wrapped.model), weights(wrapped.model), record)
                for record in loop(updater, data)
                if record.applied
            ]
            size = wrapped.data_size
    return {"found": found, "data_size": size}  # type: ignore[dict-item]


def parts_of(load: str, data_size: int, dtype: torch.dtype) -> list[list[Batch]]:
    return [batches(LOADS[load][r], seed=r, dtype=dtype) for r in range(data_size)]


def check(rows: Any, wanted: list[Step], *, tolerance: float, weight_tolerance: float) -> None:
    assert len(rows) == len(wanted)
    for (grads, after, record), step in zip(rows, wanted, strict=True):
        assert worst(grads, step.gradients) < tolerance
        assert worst(after, step.weights) < weight_tolerance
        assert record.grad_norm == pytest.approx(step.grad_norm, rel=tolerance)
        assert record.loss_mean == pytest.approx(step.loss_mean, rel=tolerance)
        assert record.denominators == {"loss": step.denominator}
        assert record.num_microbatches == step.num_microbatches


@contextlib.contextmanager
def named(*what: object) -> Any:
    try:
        yield
    except AssertionError as error:
        error.add_note(", ".join(map(str, what)))
        raise


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_and_next_weights_are_those_of_one_process(kind: str) -> None:
    for rank, result in enumerate(run(train, kind, torch.float64, None, size=4)):
        for (load, door), rows in result["found"].items():
            parts = parts_of(load, result["data_size"], torch.float64)
            wanted = oracle(parts, size=SIZE, max_norm=MAX_NORM)
            with named(kind, load, door, f"rank {rank}"):
                check(rows, wanted, tolerance=1e-12, weight_tolerance=1e-12)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2", "HSDP", "TP", "FSDP2 x TP"])
def test_with_a_loss_scale_they_are_those_of_one_process_in_the_same_precision(kind: str) -> None:
    # Where tensors are split, sums in float16 are, too, and round otherwise.
    tolerance = 5e-3 if "TP" in kind else 1e-6
    for rank, result in enumerate(run(train, kind, torch.float32, ms.FP16(), size=4)):
        for (load, door), rows in result["found"].items():
            parts = parts_of(load, result["data_size"], torch.float32)
            wanted = autocast_oracle(parts, size=SIZE, max_norm=MAX_NORM, scale=2.0**16)
            with named(kind, load, door, f"rank {rank}"):
                # Adam divides by the gradient's size, so a tiny entry turns as much as a large one.
                check(rows, wanted, tolerance=tolerance, weight_tolerance=1e-2)
