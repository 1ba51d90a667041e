"""Lazy updates on several ranks: one verdict on all, read by none, and all else as eagerly."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from distributed.loops import SIZE, counted_second_door, first_door, loss, second_door
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
from distributed.processes import outcomes_of, run
from test_lazy import Reads
from torch.nn.parallel import DistributedDataParallel

import midstep as ms
from midstep.records import UnreadRecord

pytestmark = pytest.mark.distributed

MAX_NORM = 0.5
LOADS = (4, 3, 1, 2)
SIZES = {"DDP": 3, "FSDP2": 3}


def data_of(part: int, bad: tuple[int, int] | None = None) -> list[Batch]:
    found = batches(LOADS[part], seed=part, dtype=torch.float32)
    if bad is not None and bad[0] == part:
        inputs, labels = found[bad[1]]
        found[bad[1]] = (torch.full_like(inputs, math.nan), labels.clamp(min=0))
    return found


def updater_of(kind: str, **options: Any) -> tuple[Any, ms.Updater]:
    wrapped = WRAPPINGS[kind](plain_model(torch.float32))
    optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    options.setdefault("clip", ms.ByGlobalNorm(MAX_NORM))
    return wrapped, ms.Updater(wrapped.model, optimizer, empty=ms.Skip(), **options)


def train(rank: int, size: int, kind: str) -> Any:
    del rank, size
    wrapped, updater = updater_of(kind, lazy=True)
    rows = []
    for record in first_door(updater, data_of(wrapped.data_rank)):
        is_unread = type(record) is UnreadRecord
        rows.append((is_unread, gradients(wrapped.model), weights(wrapped.model), record))
    plain = [
        (is_unread, grads, after, dataclasses.replace(record))  # read, so that it can travel
        for is_unread, grads, after, record in rows
    ]
    return wrapped.data_size, plain


# torch's fused kernels take no mixture of split and whole parameters, as a model split by TP has.
@pytest.mark.parametrize("kind", sorted(WRAPPINGS.keys() - {"TP"}))
def test_gradient_weights_and_records_are_those_of_one_process_in_float64(kind: str) -> None:
    for data_size, rows in run(train, kind, size=SIZES.get(kind, 4)):
        parts = [data_of(part) for part in range(data_size)]
        wanted = oracle(parts, size=SIZE, max_norm=MAX_NORM)
        applied = [row for row in rows if row[3].applied]
        assert all(is_unread for is_unread, *_ in applied)
        assert len(applied) == len(wanted)
        for (_, grads, after, record), step in zip(applied, wanted, strict=True):
            assert worst(grads, step.gradients) < 1e-6
            assert worst(after, step.weights) < 1e-4
            assert record.grad_norm == pytest.approx(step.grad_norm, rel=1e-6)
            assert record.loss_mean == pytest.approx(step.loss_mean, rel=1e-6)
            assert record.denominators == {"loss": step.denominator}
            assert record.num_microbatches == step.num_microbatches


def compare(rank: int, size: int, kind: str, p: float, half: bool) -> Any:
    del rank, size
    bad = (1, 0)  # on one rank alone
    found = []
    for lazy in (False, True):
        wrapped, updater = updater_of(
            kind,
            clip=ms.ByGlobalNorm(MAX_NORM, p=p),
            precision=ms.FP16(init_scale=1024.0, growth_interval=1) if half else None,
            nonfinite=ms.Skip(),
            lazy=lazy,
        )
        records = list(first_door(updater, data_of(wrapped.data_rank, bad)))
        updater.settle()
        told = [(r.verdict, r.loss_scale, r.clipped, r.step, r.lr) for r in records]
        found.append((told, weights(wrapped.model), updater.state_dict()["loss_scale"]))
    return found


@pytest.mark.parametrize(
    ("kind", "p"), [("DDP", 2.0), ("DDP", math.inf), ("FSDP2", 2.0), ("HSDP", 2.0)]
)
@pytest.mark.parametrize("half", [False, True])
def test_verdicts_scale_and_weights_are_those_of_the_eager_updater(
    kind: str, p: float, half: bool
) -> None:
    everyone = run(compare, kind, p, half, size=SIZES.get(kind, 4))
    for (told, after, scale), (told_late, after_late, scale_late) in everyone:
        assert told_late == told
        assert scale_late == scale
        assert worst(after_late, after) < 1e-5
    assert {verdict for verdict, *_ in everyone[0][1][0]} >= {
        ms.Verdict.APPLIED,
        ms.Verdict.SKIPPED_NONFINITE,
    }
    for _, (told, after, _) in everyone[1:]:  # to the last bit, or replicas would drift
        assert told == everyone[0][1][0]
        assert all(map(torch.equal, after, everyone[0][1][1]))


def count_reads(rank: int, size: int, kind: str) -> Any:
    del rank, size
    wrapped, updater = updater_of(kind, lazy=True)
    data = [(x, y.clamp(min=0)) for x, y in batches(4, seed=wrapped.data_rank, dtype=torch.float32)]
    counts = {id(y): len(y) for _, y in data}  # counted on the host, where the batches are
    with Reads() as reads:
        collectives = []
        for window in updater.windows(data, size=SIZE, count=lambda batch: counts[id(batch[1])]):
            before = updater._ranks.world.num_collectives
            for batch in window:
                with window.forward():
                    value = loss(updater.model, batch)
                window.backward(value)
            window.step()
            collectives.append(updater._ranks.world.num_collectives - before)
            found = dict(reads.found)
    return found, collectives


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_an_applied_update_reads_nothing_and_takes_one_small_collective(kind: str) -> None:
    for found, collectives in run(count_reads, kind, size=2):
        assert found == {}
        assert collectives == [1, 1]


def raise_late(rank: int, size: int, reads: bool) -> Any:
    del size
    wrapped, updater = updater_of("DDP", lazy=True)
    before = weights(wrapped.model)
    data = batches(6, seed=rank, dtype=torch.float32)
    data = [(x, y.clamp(min=0)) for x, y in data]
    if rank == 1:
        data[1] = (torch.full_like(data[1][0], math.nan), data[1][1])
    seen = []
    try:
        for record in counted_second_door(updater, data):
            seen.append(worst(before, weights(wrapped.model)))
            if reads and rank == 0:
                str(record.grad_norm)
    except ms.MidstepError as error:
        return type(error).__name__, str(error), getattr(error, "microbatch", None), seen
    return None


def test_a_bad_update_raises_on_every_rank_one_update_later() -> None:
    first, second = run(raise_late, False, size=2)
    for name, message, _, seen in (first, second):
        assert name == "NonFiniteGradient"
        assert "Update 1" in message
        assert seen == [0.0]
    assert (first[2], second[2]) == (None, 1)
    assert "another rank" in first[1]


def test_a_record_that_one_rank_reads_ends_the_run_on_all() -> None:
    first, second = outcomes_of(raise_late, True, size=2)
    assert first.value[0] == "NonFiniteGradient"
    assert "Rank 0 failed: NonFiniteGradient" in second.stderr or second.value is not None


def go_on(rank: int, size: int) -> Any:
    del size
    wrapped, updater = updater_of("DDP", lazy=True)
    data = [(x, y.clamp(min=0)) for x, y in batches(3, seed=rank, dtype=torch.float32)]
    bad = (torch.full_like(data[0][0], math.nan), data[0][1]) if rank else data[0]
    updater.update([bad], loss, count=ms.targets())
    with pytest.raises(ms.NonFiniteGradient):
        updater.update([data[1]], loss, count=ms.targets())
    record = updater.update([data[2]], loss, count=ms.targets())
    return record.update, record.step, weights(wrapped.model)


def test_after_an_error_of_all_ranks_the_run_may_go_on() -> None:
    (number, step, after), (_, _, theirs) = run(go_on, size=2)
    assert (number, step) == (1, 1)
    assert all(map(torch.equal, after, theirs))


def miscounted(rank: int, size: int) -> Any:
    del size
    wrapped, updater = updater_of("DDP", lazy=True)
    before = weights(wrapped.model)
    data = [(x, y.clamp(min=0)) for x, y in batches(4, seed=rank, dtype=torch.float32)]
    try:
        for window in updater.windows(data, size=SIZE, count=lambda b: len(b[1]) + (rank == 1)):
            updater.update(window, loss)
    except ms.MidstepError as error:
        return type(error).__name__, str(error), worst(before, weights(wrapped.model))
    return None


def test_a_wrong_count_on_one_rank_is_stepped_on_by_none_and_told_to_all() -> None:
    (first, why, moved), (second, _, moved_too) = run(miscounted, size=2)
    assert (first, second) == ("WindowError", "CountMismatch")
    assert "another rank" in why
    assert (moved, moved_too) == (0.0, 0.0)


def refuse(rank: int, size: int) -> Any:
    del rank, size
    model = DistributedDataParallel(plain_model(torch.float32), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found = []
    options: list[tuple[Any, dict[str, Any]]] = [
        (model, {}),
        (DistributedDataParallel(model.module), {"check_replicas_every": 2}),
        (
            WRAPPINGS["FSDP2"](plain_model(torch.float32)).model,
            {"clip": ms.ByGlobalNorm(1.0, p=math.inf)},
        ),
    ]
    for wrapped, stages in options:
        optimizer = torch.optim.AdamW(wrapped.parameters(), fused=True)
        with pytest.raises(ValueError, match="lazy=True") as caught:
            ms.Updater(wrapped, optimizer, lazy=True, **stages)
        found.append(str(caught.value))
    return found


def test_what_ranks_must_tell_each_other_on_the_host_is_refused() -> None:
    for found in run(refuse, size=2):
        for message, why in zip(
            found, ("find_unused_parameters", "check_replicas_every", "order inf"), strict=True
        ):
            assert why in message


def stream(rank: int, size: int) -> Any:
    del size
    wrapped, updater = updater_of("DDP", lazy=True)
    data = [(x, y.clamp(min=0)) for x, y in batches(4, seed=rank, dtype=torch.float32)]
    records = list(second_door(updater, data))
    return [type(r) is ms.UpdateRecord for r in records], weights(wrapped.model)


def test_a_streamed_window_is_looked_at_since_its_counts_meet_on_the_host() -> None:
    (eager, after), (_, theirs) = run(stream, size=2)
    assert eager == [True, True]
    assert all(map(torch.equal, after, theirs))
