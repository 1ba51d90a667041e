"""Checkpoints of many ranks on disk: a full one, and one checkpoint in the place of another."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.jobs import NAME, Job, oracle
from distributed.leftovers import STATES, checkpoints_in, lay, one_more, put
from distributed.models import WRAPPINGS, worst
from distributed.processes import run
from torch import nn

import midstep as ms

pytestmark = pytest.mark.distributed


def full_disk(rank: int, size: int, folder: str, victim: int, limit: int) -> Any:
    del size
    path = Path(folder) / NAME
    model = nn.Linear(200, 200)
    wrapped: Any = WRAPPINGS["DDP"](model).model
    updater = ms.Updater(wrapped, torch.optim.AdamW(wrapped.parameters()))
    x = torch.ones(1, 200)

    def step() -> None:
        updater.update([x], lambda model, batch: model(batch).sum(), count=ms.rows())

    step()
    ms.save(path, updater)
    step()
    if rank == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    with pytest.raises(ms.CheckpointError) as caught:
        ms.save(path, updater)
    if rank == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    left = sorted(entry.name for entry in Path(folder).iterdir())
    ms.load(path, updater)
    before = updater.clock.step
    step()
    ms.save(path, updater)
    ms.load(path, updater)
    return str(caught.value), left, before, updater.clock.step


@pytest.mark.skipif(sys.platform == "win32", reason="needs file size limits")
@pytest.mark.parametrize(
    ("victim", "limit"),
    [(1, 20_000), (1, 60_000), (0, 60_000)],
    ids=["in its own file", "in its share", "on the first rank"],
)
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_leaves_the_old_one_whole(
    victim: int, limit: int, tmp_path: Path
) -> None:
    first, second = run(full_disk, str(tmp_path), victim, limit, size=2)
    assert first == second
    message, left, before, after = first
    assert f"On rank {victim}: " in message
    assert "could not be written: [Errno 27] File too large" in message
    assert "The checkpoint saved before, if any, is whole" in message
    assert left == [NAME]
    assert (before, after) == (1, 2)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return checkpoints_in(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("many", [False, True], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("name", STATES)
def test_the_newest_whole_one_is_loaded_and_the_next_save_clears_up(
    name: str, many: bool, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path, wanted = lay(name, checkpoints, tmp_path), STATES[name][3]
    job = Job("plain", perturbed=True)
    if wanted is None:
        with pytest.raises(ms.CheckpointError, match="there is no such checkpoint"):
            ms.load(path, job.updater)
        ms.save(path, job.updater)
        assert [entry.name for entry in tmp_path.iterdir()] == [NAME]
        return
    ms.load(path, job.updater)
    assert job.step == wanted
    if many:
        run(one_more, str(path), size=2)
    else:
        job.train(wanted + 1)
        ms.save(path, job.updater)
    assert [entry.name for entry in tmp_path.iterdir()] == [NAME]
    assert path.is_dir() == many
    other = Job("plain", perturbed=True)
    ms.load(path, other.updater)
    assert other.step == wanted + 1
    assert worst(other.weights(), oracle(wanted + 1)[-1]) < 1e-12


def test_a_folder_of_somebody_else_is_left_alone(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    # Such as one that `torch.distributed.checkpoint` wrote without midstep.
    put(checkpoints["folder 2"], tmp_path / NAME)
    (tmp_path / NAME / "rank-0.pt").unlink()
    before = sorted(entry.name for entry in (tmp_path / NAME).iterdir())
    with pytest.raises(ms.CheckpointError, match="a folder is there that is no checkpoint"):
        ms.save(tmp_path / NAME, Job("plain").updater)
    assert sorted(entry.name for entry in (tmp_path / NAME).iterdir()) == before
    assert [entry.name for entry in tmp_path.iterdir()] == [NAME]
