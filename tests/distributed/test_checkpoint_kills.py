"""Checkpoints of many ranks: kill one rank or all at any moment, and a whole one is left."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from distributed.jobs import NAME, Job, oracle
from distributed.leftovers import STATES, checkpoints_in, lay
from distributed.models import worst
from distributed.processes import Outcome, outcomes_of

import midstep as ms
from midstep.ranks import board

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL"),
]

CHANGES = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}


def killed_while_saving(
    rank: int, size: int, folder: str, victims: list[int], at: tuple[int, float]
) -> int:
    """Go on for one step and save; die at a change to the disk of this rank, or after a while."""
    board._ANSWER_SECONDS = 1.0  # who is left asks for the dead, and there is nobody else
    path = Path(folder) / NAME
    job = Job("DDP" if size > 1 else "plain")
    if path.parent.exists():
        ms.load(path, job.updater)
    job.train(job.step + 1)
    pids: list[Any] = [None] * size
    dist.all_gather_object(pids, os.getpid())
    doomed = [pids[victim] for victim in victims]
    count, seconds = at
    num_changes = 0

    def die() -> None:
        for pid in sorted(doomed, key=lambda pid: pid == os.getpid()):
            os.kill(pid, signal.SIGKILL)

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal num_changes
        is_read = event == "open" and (len(args) < 2 or not str(args[1]).startswith("w"))
        if event not in CHANGES or is_read:
            return
        if num_changes == count:
            time.sleep(0.05)  # the others come as far as they can without this rank
            die()
        num_changes += 1

    if rank == victims[0]:
        if seconds:
            threading.Timer(seconds, die).start()
        else:
            sys.addaudithook(watch)
    ms.save(path, job.updater)
    if rank == victims[0] and seconds:
        time.sleep(1.0)
    return num_changes


class Survivor:
    """The checkpoint of a run that is killed again and again, watched by one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.wanted = oracle(60)
        job = Job("plain")
        job.train(1)
        ms.save(folder / NAME, job.updater)
        self.step = 1

    def live(self, victims: list[int], at: tuple[int, float]) -> list[Outcome]:
        outcomes = outcomes_of(killed_while_saving, str(self.folder), victims, at, size=2)
        job = Job("plain", perturbed=True)
        ms.load(self.folder / NAME, job.updater)
        assert job.step in {self.step, self.step + 1}
        self.step = job.step
        assert worst(job.weights(), self.wanted[self.step - 1]) < 1e-10
        return outcomes


def lives(survivor: Survivor, victims: list[int]) -> tuple[int, int]:
    """Kill at each change to the disk in turn, until a save comes to its end."""
    num_new = 0
    for num_kills in range(40):
        before = survivor.step
        outcomes = survivor.live(victims, (num_kills, 0.0))
        victim = outcomes[victims[0]]
        if victim.exit_code == 0:
            assert survivor.step == before + 1
            assert [entry.name for entry in survivor.folder.iterdir()] == [NAME]
            return num_kills, num_new
        num_new += survivor.step > before
        for rank, outcome in enumerate(outcomes):
            if rank in victims:
                assert outcome.exit_code == -signal.SIGKILL
            else:
                assert outcome.error == "RankFailure", outcome
    raise AssertionError("no save came to its end")


def test_a_kill_of_all_ranks_at_any_change_to_the_disk_leaves_a_whole_one(tmp_path: Path) -> None:
    orders = [[0, 1], [1, 0]]
    survivors = [Survivor(tmp_path / str(first)) for first, _ in orders]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lives, survivors, orders))
    assert found[0][0] >= 10
    assert 1 <= found[0][1] < found[0][0]  # some of either
    assert found[1][0] >= 2


def test_a_kill_of_one_rank_at_any_moment_leaves_a_whole_one(tmp_path: Path) -> None:
    chance = random.Random(3)
    kills = [(r % 2, (0, chance.uniform(0.001, 0.15))) for r in range(6)]
    kills += [(r % 2, (2 * (r // 2), 0.0)) for r in range(6)]
    survivors = [Survivor(tmp_path / str(index)) for index in range(len(kills))]

    def live(survivor: Survivor, kill: tuple[int, tuple[int, float]]) -> list[Outcome]:
        victim, at = kill
        return survivor.live([victim], at)

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(live, survivors, kills))
    num_killed = 0
    for (victim, _), outcomes in zip(kills, found, strict=True):
        if outcomes[victim].exit_code == 0:  # it had fewer changes to make
            continue
        num_killed += 1
        assert outcomes[victim].exit_code == -signal.SIGKILL
        # Whoever still needed it says so; the rest had done all.
        assert outcomes[1 - victim].error in {"RankFailure", None}, outcomes
    assert num_killed >= 9
    assert sum(o.error == "RankFailure" for outcomes in found for o in outcomes) >= 6


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return checkpoints_in(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("the old one put aside, the new one whole", 1),
        ("the old one put aside for a file", 1),
        ("the old one put aside, the new one whole", 2),
        ("the first one, not yet put there", 2),
    ],
)
def test_a_kill_in_the_save_after_a_kill_leaves_a_whole_one(
    name: str, size: int, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    wanted = STATES[name][3]
    assert wanted is not None

    def kill(count: int) -> int:
        """Kill all ranks at this change to the disk, and give the step that is left."""
        path = lay(name, checkpoints, tmp_path / f"{count}")
        victims = list(range(size))
        outcomes = outcomes_of(
            killed_while_saving, str(path.parent), victims, (count, 0.0), size=size
        )
        assert outcomes[0].exit_code in {0, -signal.SIGKILL}, outcomes[0]
        job = Job("plain", perturbed=True)
        ms.load(path, job.updater)
        return job.step

    # Two ranks make more changes to the disk than it is worth to try.
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(kill, range(1, 20, 1 if size == 1 else 3)))
    assert found[0] == wanted
    assert set(found) <= {wanted, wanted + 1}
    assert size > 1 or found[-1] == wanted + 1


def test_a_kill_in_the_first_save_leaves_a_whole_one_or_none(tmp_path: Path) -> None:
    def kill(place: tuple[int, int]) -> int:
        """Kill both ranks at this change that this rank makes, and give the step that is left."""
        victim, count = place
        folder = tmp_path / f"{victim} {count}"
        outcomes_of(killed_while_saving, str(folder), [victim, 1 - victim], (count, 0.0), size=2)
        job = Job("plain", perturbed=True)
        try:
            ms.load(folder / NAME, job.updater)
        except ms.CheckpointError as error:
            return 0 if "there is no such checkpoint" in str(error) else -1
        (found,) = folder.iterdir()
        names = {entry.name for entry in found.iterdir()}
        assert {"rank-0.pt", "rank-1.pt", "__0_0.distcp", "__1_0.distcp"} <= names
        assert worst(job.weights(), wanted) < 1e-12
        return job.step

    (wanted,) = oracle(1)
    places = [*((0, count) for count in range(5, 13)), *((1, count) for count in range(3))]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(kill, places))
    assert set(found) == {0, 1}
