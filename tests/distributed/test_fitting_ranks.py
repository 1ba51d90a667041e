"""A rank that runs out of memory runs its own part again; the others wait and nothing hangs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from distributed.loops import loss
from distributed.models import WRAPPINGS, Batch, batches, gradients, oracle, plain_model, worst
from distributed.processes import outcomes_of, run

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

    found = []
    count = None if streamed else ms.targets()
    for window in updater.windows(data_of(rank), rows=ms.AutoRows(grow_after=1), count=count):
        record = updater.update(window, tight)
        found.append((gradients(wrapped.model), record.step))
    return found


@pytest.mark.parametrize("streamed", [False, True])
def test_the_gradient_is_that_of_all_ranks_and_nobody_hangs(streamed: bool) -> None:
    wanted = oracle([data_of(rank) for rank in range(2)], size=1)
    for found in run(short_of_memory, streamed, size=2):
        assert [step for _, step in found] == [1, 2, 3]
        for (grads, _), step in zip(found, wanted, strict=True):
            assert worst(grads, step.gradients) < 1e-12


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


def sharded(rank: int, size: int) -> None:
    del size
    wrapped = WRAPPINGS["FSDP2"](plain_model())
    updater = ms.Updater(wrapped.model, torch.optim.SGD(wrapped.model.parameters(), lr=0.1))
    next(updater.windows(data_of(rank), rows=ms.AutoRows(), count=ms.targets()))


def test_sharded_models_are_refused_on_every_rank() -> None:
    for outcome in outcomes_of(sharded, size=2):
        assert outcome.error == "ValueError"
        assert "every forward and backward is a collective" in outcome.message


def shot_at(rank: int, size: int, place: int, is_worse: bool) -> Any:
    """Rank 1 runs out of memory before one operation, counted from its first forward on."""
    del size
    warnings.simplefilter("ignore")
    wrapped = WRAPPINGS["DDP"](plain_model())
    optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=0.01, weight_decay=0.1)
    updater = ms.Updater(wrapped.model, optimizer, clip=ms.ByGlobalNorm(0.5))
    shooting = Shooting()
    num_steps = 0

    def note(*_: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        shooting.is_on = False

    optimizer.register_step_post_hook(note)

    def tight(model: Any, batch: Batch) -> ms.LossSum:
        shooting.is_on = rank == 1
        return loss(model, batch)

    found = []
    count = ms.targets()
    for window in updater.windows(data_of(rank), rows=ms.AutoRows(first=2), count=count):
        shooting.is_on, shooting.num_seen = False, 0
        shooting.after = [place, 3] if is_worse else [place]
        with shooting:
            record = updater.update(window, tight)
        found.append((gradients(wrapped.model), weights(wrapped.model), record))
    return found, num_steps, shooting.fired


def most_operations() -> int:
    return 480


@pytest.mark.parametrize("part", range(4))
def test_an_error_on_one_rank_at_any_operation_takes_all_back_or_none(part: int) -> None:
    wanted = oracle([data_of(rank) for rank in range(2)], size=1, max_norm=0.5)
    fired = set()
    for place in range(part, 130, 4 * 5):
        for found, num_steps, names in run(shot_at, place, place % 3 == 0, size=2):
            assert num_steps == 3
            fired |= set(names)
            for (grads, ends, record), step in zip(found, wanted, strict=True):
                assert record.denominators == {"loss": step.denominator}
                assert record.grad_norm == pytest.approx(step.grad_norm, rel=1e-12)
                assert worst(ends, step.weights) < 1e-12
    assert fired
