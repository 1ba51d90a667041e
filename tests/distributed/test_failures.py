"""One rank fails: every rank ends, soon and with the same clear error."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from distributed.loops import loss
from distributed.models import WRAPPINGS, batches, plain_model
from distributed.processes import Outcome, outcomes_of

import midstep as ms
from midstep.ranks import board

pytestmark = pytest.mark.distributed

# Far below the 90 seconds after which a collective gives up.
SOON_SECONDS = 20.0


class Broken(Exception):
    """What a rank fails with."""


class Bomb(torch.autograd.Function):
    """Passes its input on and fails in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - torch's own
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - torch's own
        raise Broken("bad batch")


class Fault:
    """Fails on one rank, the fourth time that a place is passed."""

    def __init__(self, place: str, *, is_armed: bool) -> None:
        self.place = place
        self.is_armed = is_armed
        self.passed: dict[str, int] = {}

    def is_now(self, place: str) -> bool:
        self.passed[place] = self.passed.get(place, 0) + 1
        return self.is_armed and place == self.place and self.passed[place] == 4

    def at(self, place: str) -> None:
        if not self.is_now(place):
            return
        if place == "memory":
            raise torch.OutOfMemoryError("tried to allocate 3 GiB")
        if place == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise Broken("bad batch")

    def loader(self, seed: int) -> Any:
        for inputs, labels in batches(6, seed=seed):
            self.at("loader")
            yield inputs, torch.zeros_like(labels)

    def count(self, batch: Any) -> int:
        self.at("count")
        return len(batch[1])

    def loss(self, model: Any, batch: Any) -> ms.LossSum:
        if self.is_now("forward"):
            model = torch.nn.Sequential(model, torch.nn.Linear(3, 3))
        self.at("memory")
        self.at("killed")
        value = loss(model, batch)
        self.at("loss")
        if self.is_now("backward"):
            return ms.LossSum(Bomb.apply(value.sum), value.count)
        return ms.LossSum(value.sum, value.count + int(self.is_now("count disagrees")))


def train(rank: int, size: int, kind: str, fault: tuple[str, int], lingers: bool = False) -> None:
    """Train for three windows of two; in the second one rank fails."""
    del size
    if lingers:
        board._STUCK_SECONDS = 2.0
    if fault[0] == "killed":
        board._ANSWER_SECONDS = 1.0  # nobody else could answer
    wrapped = WRAPPINGS[kind](plain_model())
    updater = ms.Updater(wrapped.model, torch.optim.SGD(wrapped.model.parameters(), lr=0.1))
    saboteur = Fault(fault[0], is_armed=rank == fault[1])
    step = updater.optimizer.step

    def own_step() -> None:
        if updater.clock.step == 1:
            for _ in range(4):
                saboteur.at("optimizer")
        step()

    updater.optimizer.step = own_step  # type: ignore[method-assign]
    try:
        for window in updater.windows(
            saboteur.loader(wrapped.data_rank), size=2, count=saboteur.count
        ):
            updater.update(window, saboteur.loss)
    except BaseException:
        if saboteur.is_armed and lingers:
            time.sleep(5.0)  # a process that outlives its error, as a notebook does
        raise


def check(outcomes: list[Outcome], failing: int, error: str, message: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.seconds < SOON_SECONDS, outcome
        if rank == failing:
            assert outcome.error == error, outcome
            assert message in outcome.message
        else:
            assert outcome.error == "RankFailure", outcome.message + outcome.stderr
            assert outcome.details["rank"] == failing
            assert f"Rank {failing} failed: {error}: " in outcome.message
            assert message in outcome.message


PLACES = {
    "loader": ("Broken", "bad batch"),
    "count": ("Broken", "bad batch"),
    "forward": ("RuntimeError", "mat1 and mat2"),
    "memory": ("OutOfMemoryError", "3 GiB"),
    "loss": ("Broken", "bad batch"),
    "backward": ("Broken", "bad batch"),
    "count disagrees": ("CountMismatch", "Microbatch 1"),
    "optimizer": ("Broken", "bad batch"),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_error_on_one_rank_ends_the_others_with_its_name_and_cause(place: str) -> None:
    outcomes = outcomes_of(train, "DDP", (place, 1), size=2)
    check(outcomes, 1, *PLACES[place])


@pytest.mark.parametrize("place", ["loader", "memory", "backward"])
def test_so_it_does_where_forward_and_backward_are_collectives(place: str) -> None:
    outcomes = outcomes_of(train, "FSDP2", (place, 2), size=3)
    check(outcomes, 2, *PLACES[place])


@pytest.mark.parametrize("kind", ["DDP", "FSDP2", "TP"])
def test_so_it_does_when_the_rank_that_holds_the_store_fails(kind: str) -> None:
    outcomes = outcomes_of(train, kind, ("memory", 0), size=2)
    check(outcomes, 0, *PLACES["memory"])


def test_a_rank_that_lives_on_after_its_error_still_ends_the_others() -> None:
    assert board._STUCK_SECONDS < SOON_SECONDS
    outcomes = outcomes_of(train, "DDP", ("loss", 1), True, size=2)
    assert outcomes[0].exit_code == 1
    assert "Rank 1 failed: Broken: bad batch" in outcomes[0].stderr


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_a_rank_that_is_killed_is_named(kind: str, killed: int) -> None:
    outcomes = outcomes_of(train, kind, ("killed", killed), size=2)
    assert outcomes[killed].exit_code == -signal.SIGKILL
    left = outcomes[1 - killed]
    assert left.error == "RankFailure", left
    assert left.seconds < SOON_SECONDS
    assert f"Rank {killed} is gone without a word" in left.message
    assert left.details["rank"] == killed
