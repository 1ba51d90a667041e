"""Every kind of parallel, every unevenness: the gradient of one process, and its next weights."""

from __future__ import annotations

import contextlib
import dataclasses
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
SCALE = 2.0**10
# Batches by rank, of which a window takes two each.
LOADS = {
    "equal": (4, 4, 4, 4),
    "uneven": (4, 3, 1, 2),
    "empty rank": (3, 0, 1, 4),
    "tail": (3, 5, 6, 1),
}
# Three ranks where that will do: 8 rows on 3 shards, and no factor is a power of two.
SIZES = {"DDP": 3, "FSDP2": 3}


@dataclasses.dataclass(frozen=True)
class Plan:
    kind: str
    doors: tuple[str, ...]
    dtype: torch.dtype = torch.float64
    precision: ms.FP16 | None = None

    def parts(self, load: str, data_size: int) -> list[list[Batch]]:
        return [batches(LOADS[load][r], seed=r, dtype=self.dtype) for r in range(data_size)]


def train(rank: int, size: int, plan: Plan) -> dict[tuple[str, str], Any]:
    del rank, size
    found = {}
    for load in LOADS:
        for door in plan.doors:
            wrapped = WRAPPINGS[plan.kind](plain_model(plan.dtype))
            optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=0.01, weight_decay=0.1)
            updater = ms.Updater(
                wrapped.model,
                optimizer,
                clip=ms.ByGlobalNorm(MAX_NORM),
                precision=plan.precision,
                empty=ms.Skip(),
            )
            data = plan.parts(load, wrapped.data_size)
            rows = [
                (gradients(wrapped.model), weights(wrapped.model), record)
                for record in LOOPS[door](updater, data[wrapped.data_rank])
                if record.applied
            ]
            found[load, door] = (wrapped.data_size, rows)
    return found


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


@pytest.mark.parametrize("kind", WRAPPINGS)
def test_gradient_and_next_weights_are_those_of_one_process(kind: str) -> None:
    plan = Plan(kind, ("update", "loop, streamed"))
    for rank, found in enumerate(run(train, plan, size=SIZES.get(kind, 4))):
        for (load, door), (data_size, rows) in found.items():
            wanted = oracle(plan.parts(load, data_size), size=SIZE, max_norm=MAX_NORM)
            with named(kind, load, door, f"rank {rank}"):
                check(rows, wanted, tolerance=1e-12, weight_tolerance=1e-12)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_they_are_by_either_door_counted_or_streamed(kind: str) -> None:
    plan = Plan(kind, ("update, streamed", "loop, counted"))
    for rank, found in enumerate(run(train, plan, size=SIZES[kind])):
        for (load, door), (data_size, rows) in found.items():
            wanted = oracle(plan.parts(load, data_size), size=SIZE, max_norm=MAX_NORM)
            with named(kind, load, door, f"rank {rank}"):
                check(rows, wanted, tolerance=1e-12, weight_tolerance=1e-12)


@pytest.mark.parametrize("kind", WRAPPINGS)
def test_in_float32_they_are_those_of_one_process_in_float64_up_to_rounding(kind: str) -> None:
    plan = Plan(kind, ("update",), torch.float32)
    for rank, found in enumerate(run(train, plan, size=SIZES.get(kind, 4))):
        for (load, door), (data_size, rows) in found.items():
            wanted = oracle(plan.parts(load, data_size), size=SIZE, max_norm=MAX_NORM)
            with named(kind, load, door, f"rank {rank}"):
                # Adam turns a tiny entry as much as a large one, and tiny ones are mostly rounding.
                check(rows, wanted, tolerance=1e-6, weight_tolerance=1e-4)


@pytest.mark.parametrize("kind", WRAPPINGS)
def test_with_a_loss_scale_they_are_those_of_one_process_in_the_same_precision(kind: str) -> None:
    doors = ("update",) if "TP" in kind else ("update", "loop, streamed")
    plan = Plan(kind, doors, torch.float32, ms.FP16(init_scale=SCALE))
    # DDP's mean over four ranks is undone by a power of two, exactly.
    for rank, found in enumerate(run(train, plan, size=4)):
        for (load, door), (data_size, rows) in found.items():
            parts = plan.parts(load, data_size)
            wanted = autocast_oracle(parts, size=SIZE, max_norm=MAX_NORM, scale=SCALE)
            wide = oracle(parts, size=SIZE, max_norm=MAX_NORM)
            # Where tensors are split, so are sums in float16, and round otherwise; streamed, or
            # with DDP's mean to undo, the seed is another number. Adam turns a tiny entry as much
            # as a large one.
            is_alike = kind in ("FSDP2", "HSDP") and door == "update"
            with named(kind, load, door, f"rank {rank}"):
                check(
                    rows,
                    wanted,
                    tolerance=1e-6 if is_alike else 5e-3,
                    weight_tolerance=1e-6 if is_alike else 1e-2,
                )
                check(rows, wide, tolerance=1e-2, weight_tolerance=2e-2)
