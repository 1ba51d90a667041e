"""Windows that are left before their step: on all ranks without a trace, on one rank an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.loops import LOOPS, SIZE, loss, stepped
from distributed.models import (
    IGNORED,
    WRAPPINGS,
    Batch,
    batches,
    gradients,
    oracle,
    plain_model,
    worst,
)
from distributed.processes import outcomes_of, run

import midstep as ms
from midstep.ranks import board

pytestmark = pytest.mark.distributed

PLACES = ("before a forward", "after a backward", "after the last forward")
SHARDINGS = {
    "FSDP2": ms.Sharding(),
    "FSDP2, kept": ms.Sharding(keep_gathered=True),
    "HSDP, reduced": ms.Sharding(reduce_every_microbatch=True),
}


def leave(window: Any, model: Any, place: str) -> None:
    """Run a window up to some place and no further."""
    for index, batch in enumerate(window):
        if place == "before a forward":
            return
        with window.forward():
            value = loss(model, batch)
        if place == "after the last forward" and window.is_last:
            return
        window.backward(value)
        if place == "after a backward" and index == 0:
            return


def data_of(rank: int) -> list[Batch]:
    """Three windows; what is left of the second counts far more on one rank than on another."""
    found = batches(6, seed=rank)
    inputs, labels = found[SIZE]
    found[SIZE] = (inputs.repeat(1 + 20 * rank, 1), labels.clamp(min=0).repeat(1 + 20 * rank))
    return found


def leave_one_and_go_on(rank: int, size: int, kind: str) -> dict[tuple[str, bool], Any]:
    del size
    found = {}
    for place in PLACES:
        for streamed in (False, True):
            wrapped = WRAPPINGS[kind.partition(",")[0]](plain_model())
            updater = ms.Updater(
                wrapped.model,
                torch.optim.AdamW(wrapped.model.parameters(), lr=0.01, weight_decay=0.1),
                sharding=SHARDINGS.get(kind),
            )
            rows = found[place, streamed] = []
            count = None if streamed else ms.targets()
            windows = updater.windows(data_of(rank), size=SIZE, count=count)
            for index, window in enumerate(windows):
                if index == 1:
                    leave(window, updater.model, place)
                    continue
                record = stepped(updater, window)
                rows.append((gradients(wrapped.model), record.step))
    return found


@pytest.mark.parametrize("kind", ["DDP", *SHARDINGS])
def test_a_window_that_all_ranks_leave_has_left_no_trace_in_the_next(kind: str) -> None:
    size = 4 if "HSDP" in kind else 2
    parts = [data_of(rank) for rank in range(size)]
    wanted = oracle([part[:SIZE] + part[2 * SIZE :] for part in parts], size=SIZE)
    for found in run(leave_one_and_go_on, kind, size=size):
        for way, rows in found.items():
            assert [step for _, step in rows] == [1, 2], way
            for (grads, _), step in zip(rows, wanted, strict=True):
                assert worst(grads, step.gradients) < 1e-12, way


def leave_alone(rank: int, size: int, kind: str) -> None:
    """One rank breaks off, and begins another pass; the other goes on."""
    del size
    board._STUCK_SECONDS = 2.0
    wrapped = WRAPPINGS[kind](plain_model())
    updater = ms.Updater(wrapped.model, torch.optim.SGD(wrapped.model.parameters(), lr=0.1))
    for window in updater.windows(data_of(rank), size=SIZE):
        if rank == 0:
            leave(window, updater.model, "after a backward")
            break
        stepped(updater, window)
    for window in updater.windows(data_of(rank), size=SIZE):
        stepped(updater, window)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_a_window_that_one_rank_alone_leaves_ends_both(kind: str) -> None:
    for outcome in outcomes_of(leave_alone, kind, size=2):
        assert outcome.error == "RankFailure", outcome
        assert "Rank 0 failed: it left window 1 before its step" in outcome.message
        assert outcome.details["rank"] == 0
        assert outcome.seconds < 20.0


def break_between_passes(rank: int, size: int) -> list[int]:
    """Stop a pass after two updates on all ranks, as a limit on steps does, and begin others."""
    del size
    board._ANSWER_SECONDS = 1.0  # there is nobody else to ask
    wrapped = WRAPPINGS["DDP"](plain_model())
    updater = ms.Updater(wrapped.model, torch.optim.SGD(wrapped.model.parameters(), lr=0.1))
    for _ in range(3):
        limit = updater.clock.step + 2
        for window in updater.windows(data_of(rank), size=1):
            if updater.clock.step == limit:
                break
            stepped(updater, window)
    if rank == 1:
        raise ValueError("a fault after all that")
    return [record.step for record in LOOPS["update"](updater, data_of(rank))]


def test_passes_that_all_ranks_break_off_are_no_failure_and_a_later_one_still_is() -> None:
    first, second = outcomes_of(break_between_passes, size=2)
    assert second.error == "ValueError"
    assert first.error == "RankFailure"
    assert "Rank 1 is gone without a word" in first.message


def raise_alike_and_go_on(rank: int, size: int, kind: str, bad: str) -> Any:
    """Every rank raises the same error; who catches it everywhere goes on."""
    wrapped = WRAPPINGS[kind](plain_model())
    updater = ms.Updater(
        wrapped.model, torch.optim.AdamW(wrapped.model.parameters(), lr=0.01, weight_decay=0.1)
    )
    data = data_of(rank)
    if bad == "empty":
        data[SIZE : 2 * SIZE] = [(x, torch.full_like(y, IGNORED)) for x, y in data[SIZE : 2 * SIZE]]
    elif rank == size - 1:
        data[SIZE] = (data[SIZE][0] * float("nan"), torch.zeros_like(data[SIZE][1]))
    errors, found = [], []
    for window in updater.windows(data, size=SIZE, count=ms.targets()):
        try:
            updater.update(window, loss)
        except ms.MidstepError as error:
            errors.append((type(error).__name__, str(error)))
        else:
            found.append(gradients(wrapped.model))
    return errors, found


@pytest.mark.parametrize("bad", ["empty", "not finite"])
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_an_error_that_all_ranks_raise_alike_is_nobodys_failure(kind: str, bad: str) -> None:
    results = run(raise_alike_and_go_on, kind, bad, size=2)
    parts = [data_of(rank) for rank in range(2)]
    wanted = oracle([part[:SIZE] + part[2 * SIZE :] for part in parts], size=SIZE)
    assert results[0][0] == results[1][0]
    assert [name for name, _ in results[0][0]] == [
        "EmptyWindow" if bad == "empty" else "NonFiniteGradient"
    ]
    for _, found in results:
        assert len(found) == len(wanted) == 2
        for grads, step in zip(found, wanted, strict=True):
            assert worst(grads, step.gradients) < 1e-12
