"""A rank that runs out of memory runs its own part again; the others wait and nothing hangs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from distributed.loops import loss
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
from shooting import Shooting

import midstep as ms

pytestmark = pytest.mark.distributed


def data_of(rank: int) -> list[Batch]:
    """Batches of unequal sizes; one rank has one batch less."""
    found = batches(12, seed=rank)
    joined = [
        (torch.cat([x for x, _ in part]), torch.cat([y for _, y in part]))
        for part in (found[:5], found[5:9], found[9:])
    ]
    return joined[: 3 - rank]


def short_of_memory(rank: int, size: int, streamed: bool) -> Any:
    """Rank 1 fits two rows; now and then forward, backward, and the last microbatch fail."""
    del size
    warnings.simplefilter("ignore")
    wrapped = WRAPPINGS["DDP"](plain_model())
    updater = ms.Updater(
        wrapped.model, torch.optim.AdamW(wrapped.model.parameters(), lr=0.01, weight_decay=0.1)
    )
    calls = 0

    def tight(model: Any, batch: Batch) -> ms.LossSum:
        nonlocal calls
        calls += 1
        value = loss(model, batch)
        if rank == 1 and len(batch[0]) > 2:
            if calls % 2:
                raise torch.OutOfMemoryError("in a forward")

            def fail(_: Any) -> None:
                raise torch.OutOfMemoryError("in a backward")

            value.sum.register_hook(fail)
        return value

    found, numbers = [], []
    count = None if streamed else ms.targets()
    for window in updater.windows(data_of(rank), rows=ms.AutoRows(grow_after=1), count=count):
        record = updater.update(window, tight)
        found.append((gradients(wrapped.model), record.step))
        numbers.append(record.num_microbatches)
    return found, numbers


@pytest.mark.parametrize("streamed", [False, True])
def test_the_gradient_is_that_of_all_ranks_and_nobody_hangs(streamed: bool) -> None:
    wanted = oracle([data_of(rank) for rank in range(2)], size=1)
    ranks = run(short_of_memory, streamed, size=2)
    assert ranks[0][1] == ranks[1][1]  # microbatches of both, which no rank knows by itself
    assert ranks[0][1][2] == 1  # the last batch is of one rank alone
    assert ranks[0][1][0] > 2
    for found, _ in ranks:
        assert [step for _, step in found] == [1, 2, 3]
        for (grads, _), step in zip(found, wanted, strict=True):
            assert worst(grads, step.gradients) < 1e-12


def calm(rank: int, size: int) -> list[int]:
    del size
    wrapped = WRAPPINGS["DDP"](plain_model())
    updater = ms.Updater(wrapped.model, torch.optim.SGD(wrapped.model.parameters(), lr=0.1))
    world = updater._ranks.world
    counted, before = [], world.num_collectives
    for window in updater.windows(data_of(rank)[:2], rows=ms.AutoRows(), count=ms.targets()):
        updater.update(window, loss)
        counted.append(world.num_collectives - before)
        before = world.num_collectives
    return counted


def test_agreeing_costs_three_tiny_collectives_where_nothing_fails() -> None:
    # Opening; who has gradients, their sum, the window's end; and an agreement before two of these
    # and before the step.
    for counted in run(calm, size=2):
        assert counted == [7, 7]


def never_fits(rank: int, size: int) -> None:
    del size
    warnings.simplefilter("ignore")
    wrapped = WRAPPINGS["DDP"](plain_model())
    updater = ms.Updater(wrapped.model, torch.optim.SGD(wrapped.model.parameters(), lr=0.1))

    def none(model: Any, batch: Batch) -> ms.LossSum:
        if rank == 1:
            raise torch.OutOfMemoryError("always")
        return loss(model, batch)

    for window in updater.windows(data_of(rank), rows=ms.AutoRows(), count=ms.targets()):
        updater.update(window, none)


def test_a_rank_that_never_fits_ends_the_others() -> None:
    first, second = outcomes_of(never_fits, size=2)
    assert second.error == "OutOfMemory"
    assert first.error == "RankFailure"
    assert "Rank 1" in first.message


def shot_at(rank: int, size: int, places: list[int], settings: dict[str, Any]) -> Any:
    """Rank 1 runs out of memory before one operation, counted from its first forward on."""
    del size
    warnings.simplefilter("ignore")
    outcomes = []
    for place in places:
        wrapped = WRAPPINGS["DDP"](plain_model())
        optimizer = torch.optim.AdamW(
            wrapped.model.parameters(), lr=0.01, weight_decay=0.1, **settings
        )
        updater = ms.Updater(wrapped.model, optimizer, clip=ms.ByGlobalNorm(0.5))
        outcomes.append(shot_run(rank, place, wrapped.model, optimizer, updater))
    return outcomes


def shot_run(rank: int, place: int, model: Any, optimizer: Any, updater: ms.Updater) -> Any:
    shooting, fired, steps = Shooting(), [], []

    def note(*_: Any) -> None:
        steps.append(1)
        shooting.is_on = False  # what comes after a step cannot be run again

    optimizer.register_step_post_hook(note)

    def tight(trained: Any, batch: Batch) -> ms.LossSum:
        shooting.is_on = rank == 1
        return loss(trained, batch)

    found = []
    auto = ms.AutoRows()
    for window in updater.windows(data_of(rank), rows=auto, count=ms.targets()):
        updater._feed.fit.rows = None
        shooting.is_on, shooting.num_seen = False, 0
        shooting.after = [place, 5] if place % 3 == 0 else [place]
        with shooting:
            record = updater.update(window, tight)
        found.append((weights(model), record))
        fired += shooting.fired
        shooting.fired.clear()
    return found, len(steps), fired


@pytest.mark.parametrize("settings", [{}, {"foreach": True}], ids=["loop", "foreach"])
def test_an_error_on_one_rank_before_any_operation_is_as_none(settings: dict[str, Any]) -> None:
    wanted = oracle([data_of(rank) for rank in range(2)], size=1, max_norm=0.5)
    fired: set[str] = set()
    for outcomes in run(shot_at, list(range(0, 260, 4)), settings, size=2, seconds=40.0):
        for found, num_steps, names in outcomes:
            assert num_steps == 3
            fired |= set(names)
            for (ends, record), step in zip(found, wanted, strict=True):
                assert record.denominators == {"loss": step.denominator}
                assert record.grad_norm == pytest.approx(step.grad_norm, rel=1e-12)
                assert record.loss_mean == pytest.approx(step.loss_mean, rel=1e-12)
                assert worst(ends, step.weights) < 1e-12
    for operations in (
        ("softmax", "nll_loss", "mm"),  # before the sum over ranks,
        ("vector_norm", "copy_", "local_scalar"),  # for the norm after it,
        ("addcdiv", "addcmul", "lerp", "sqrt", "foreach_add"),  # and in the step
    ):
        assert any(operation in name for name in fired for operation in operations), fired


def in_a_collective(rank: int, size: int) -> None:
    del size
    warnings.simplefilter("ignore")
    wrapped = WRAPPINGS["DDP"](plain_model())
    updater = ms.Updater(wrapped.model, torch.optim.SGD(wrapped.model.parameters(), lr=0.1))
    shooting = Shooting(0)
    shooting.is_on, shooting.only = False, "c10d"

    def arming(model: Any, batch: Batch) -> ms.LossSum:
        shooting.is_on = rank == 1
        return loss(model, batch)

    for window in updater.windows(data_of(rank), rows=ms.AutoRows(), count=ms.targets()):
        with shooting:
            updater.update(window, arming)


def test_an_error_inside_a_collective_ends_all_ranks_and_none_waits() -> None:
    first, second = outcomes_of(in_a_collective, size=2)
    assert second.error == "OutOfMemory"
    assert "Out of memory in a collective" in second.message
    assert first.error == "RankFailure"


def skipping(rank: int, size: int, place: int) -> Any:
    """A window without targets, one that is not finite, and a good one, shot at on rank 1."""
    del size
    warnings.simplefilter("ignore")
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4)).double()
    wrapped = WRAPPINGS["DDP"](model)
    updater = ms.Updater(
        wrapped.model,
        torch.optim.SGD(wrapped.model.parameters(), lr=0.1),
        nonfinite=ms.Skip(max_consecutive=5),
        empty=ms.Skip(max_consecutive=5),
    )
    data = [(torch.randn(4, 6, dtype=torch.float64), torch.arange(4)) for _ in range(3)]
    data[0][1][:] = -100
    data[1][0][0] = float("nan") if rank == 0 else 1.0
    shooting, found = Shooting(), []

    def arming(trained: Any, batch: Batch) -> ms.LossSum:
        shooting.is_on = rank == 1
        return loss(trained, batch)

    for window in updater.windows(data, rows=ms.AutoRows(), count=ms.targets()):
        updater._feed.fit.rows = None
        shooting.is_on, shooting.num_seen, shooting.after = False, 0, [place]
        with shooting:
            record = updater.update(window, arming)
        found.append((record.verdict.value, record.step, record.num_microbatches))
    return found, [b.clone() for b in wrapped.model.buffers()]


@pytest.mark.parametrize("place", [2, 30, 55])
def test_a_skipped_window_is_agreed_on_too(place: int) -> None:
    (first, _), (second, _) = run(skipping, place, size=2)
    assert first == second
    verdicts = [verdict for verdict, *_ in first]
    assert verdicts == ["skipped_empty", "skipped_nonfinite", "applied"]
    assert first[2][2] in {2, 3}  # pieces of both ranks


def split(rank: int, size: int, kind: str) -> None:
    del size
    if kind == "sync":
        model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        model[1] = torch.nn.SyncBatchNorm(4)  # DDP itself wants a GPU for it
    else:
        wrapped = WRAPPINGS[kind](plain_model()).model
    updater = ms.Updater(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    next(updater.windows(data_of(rank), rows=ms.AutoRows(), count=ms.targets()))


@pytest.mark.parametrize("kind", ["FSDP2", "TP", "sync"])
def test_models_whose_forward_is_a_collective_are_refused_on_every_rank(kind: str) -> None:
    for outcome in outcomes_of(split, kind, size=2):
        assert outcome.error == "ValueError"
        assert "every forward and backward is a collective" in outcome.message
