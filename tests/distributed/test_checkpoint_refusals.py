"""Checkpoints of many ranks that are refused: on all ranks alike, and nothing is changed by it."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.jobs import NAME, Job, everything, oracle
from distributed.models import WRAPPINGS, plain_model, worst
from distributed.processes import run
from torch import nn
from torch.distributed.checkpoint import metadata as dcp_metadata

import midstep as ms

pytestmark = pytest.mark.distributed


def other_updaters() -> dict[str, Callable[[], ms.Updater]]:
    def shaped() -> ms.Updater:
        model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)).double()
        wrapped = WRAPPINGS["DDP"](model).model
        return ms.Updater(wrapped, torch.optim.AdamW(wrapped.parameters()))

    def grouped() -> ms.Updater:
        model = WRAPPINGS["DDP"](plain_model()).model
        parameters = list(model.parameters())
        return ms.Updater(model, torch.optim.AdamW([{"params": [p]} for p in parameters]))

    return {
        "is of another model": shaped,
        "parameters in the optimizer's groups": grouped,
        "saved with precision `FP32`": lambda: Job("DDP", precision=ms.BF16()).updater,
        "saved with clip rule": lambda: Job("DDP", clip=ms.ByValue(1.0)).updater,
    }


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2000])


# What is done to a folder, and what is said of it then.
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "there is no such checkpoint": shutil.rmtree,
    "it is a folder without `rank-0.pt`": lambda f: (f / "rank-0.pt").unlink(),
    "it is a folder without `.metadata`": lambda f: (f / ".metadata").unlink(),
    "it is a folder without `rank-1.pt`": lambda f: (f / "rank-1.pt").unlink(),
    "rank-1.pt` cannot be read": lambda f: cut(f / "rank-1.pt"),
    "are not of one save": lambda f: edit(f / "rank-1.pt", lambda c: c.update(save="x")),
    "has schema 99": lambda f: edit(f / "rank-0.pt", lambda c: c.update(schema=99)),
    "cannot be read as a checkpoint: ": lambda f: cut(f / "__1_0.distcp"),
    "__0_0.distcp": lambda f: (f / "__0_0.distcp").unlink(),
    "does not fit this updater": lambda f: edit(
        f / "rank-1.pt", lambda c: c["updater"]["clock"].pop("step")
    ),
}


def refused(path: Path, updater: ms.Updater) -> str:
    before = everything(updater)
    with pytest.raises(ms.CheckpointError) as caught:
        ms.load(path, updater)
    assert everything(updater) == before
    assert caught.value.on_all_ranks
    return str(caught.value)


def refusals(rank: int, size: int, folder: str) -> dict[str, str]:
    del size
    path, spare = Path(folder) / NAME, Path(folder) / "spare"
    job = Job("DDP")
    job.train(1)
    ms.save(path, job.updater)
    found = {message: refused(path, make()) for message, make in other_updaters().items()}
    job.train(2)  # so that whatever is taken shows
    if rank == 0:
        shutil.copytree(path, spare)
    for message, damage in DAMAGES.items():
        if rank == 0:
            damage(path)
        dist.barrier()
        found[message] = refused(path, job.updater)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(spare, path)
    # Nobody's run has ended by it.
    dist.barrier()
    ms.load(path, job.updater)
    job.train(2)
    found["weights"] = repr(worst(job.weights(), oracle(2)[1]) < 1e-12)
    return found


def test_a_checkpoint_that_does_not_fit_is_refused_on_all_ranks_alike(tmp_path: Path) -> None:
    first, second = run(refusals, str(tmp_path), size=2)
    assert first == second
    assert first.pop("weights") == "True"
    for wanted, message in first.items():
        assert wanted in message
        assert "no such checkpoint" in wanted or "Nothing was changed." in message


def awkward_saves(rank: int, size: int, folder: str) -> dict[str, Any]:
    del size
    path, found = Path(folder) / NAME, {}
    job = Job("FSDP2")
    job.train(1)
    ms.save(path, job.updater)
    attempts: dict[str, Callable[[], None]] = {
        "one extra": lambda: ms.save(path, job.updater, extra={"a": object()} if rank else None),
        "all extras": lambda: ms.save(path, job.updater, extra={"a": object()}),
        "split extra": lambda: ms.save(
            path, job.updater, extra={"w": next(iter(job.updater.model.parameters()))}
        ),
        "paths": lambda: ms.save(path.with_name(f"{rank}"), job.updater),
        "folder in the way": lambda: ms.save(Path(folder) / "full", job.updater),
    }
    if not rank:
        (Path(folder) / "full").mkdir()
        (Path(folder) / "full" / "precious").touch()
    dist.barrier()
    for name, attempt in attempts.items():
        try:
            attempt()
        except (ms.CheckpointError, TypeError) as error:
            found[name] = (type(error).__name__, str(error))
    windows = job.updater.windows(job.loader, size=1, count=ms.targets())
    next(windows)
    try:
        ms.save(path, job.updater)
    except ms.WindowError as error:
        found["window"] = (type(error).__name__, str(error))
    windows.close()  # type: ignore[attr-defined]
    job.train(2)
    ms.save(path, job.updater)
    dist.barrier()
    found["left"] = sorted(entry.name for entry in Path(folder).iterdir())
    return found


def test_what_cannot_be_saved_is_refused_on_all_ranks_alike(tmp_path: Path) -> None:
    first, second = run(awkward_saves, str(tmp_path), size=2)
    assert first == second
    assert first["one extra"][0] == "CheckpointError"
    assert "On rank 1: TypeError: The state at `['extra']['a']`" in first["one extra"][1]
    assert first["all extras"][0] == "TypeError"
    assert "is a `DTensor`" in first["split extra"][1]
    assert "the ranks were given different paths" in first["paths"][1]
    assert "a folder is there that is no checkpoint" in first["folder in the way"][1]
    assert first["window"][0] == "WindowError"
    assert first["left"] == [NAME, "full"]
    assert (tmp_path / "full" / "precious").exists()


# -- code in a checkpoint ------------------------------------------------------------------------


def save_one(rank: int, size: int, folder: str) -> None:
    del rank, size
    job = Job("FSDP2")
    job.train(1)
    ms.save(Path(folder) / NAME, job.updater)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    run(save_one, str(folder), size=2)
    return folder / NAME


class Bomb:
    """What runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


def asking_for(module: str, name: str, protocol: int = 4) -> Callable[[Path], bytes]:
    """A pickle that calls a name with the path of the mark."""

    def make(mark: Path) -> bytes:
        text = pickle.dumps(str(mark), protocol=0)[:-1]
        if protocol < 4:
            return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"(" + text + b"tR."
        named = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name))
        return b"\x80\x04" + named + b"\x93(" + text + b"tR."

    return make


HERE = "torch.distributed.checkpoint.metadata"
PICKLES: dict[str, Callable[[Path], bytes]] = {
    "a call": lambda mark: pickle.dumps(Bomb(mark)),
    "an old protocol": lambda mark: pickle.dumps(Bomb(mark), protocol=0),
    "an attribute of an index": lambda mark: pickle.dumps(
        dcp_metadata.Metadata({}, planner_data=Bomb(mark))
    ),
    "os.mkdir": asking_for("os", "mkdir"),
    "posix.mkdir, protocol 2": asking_for("posix", "mkdir", protocol=2),
    "eval": asking_for("builtins", "eval"),
    "getattr": asking_for("builtins", "getattr"),
    "a module that is admitted": asking_for(HERE, "os"),
    "a way out of a class": asking_for(HERE, "Metadata.__init__.__globals__"),
    "a way out of a module": asking_for(HERE, "os.mkdir"),
    "torch.load": asking_for("torch", "load"),
    "a dtype that is none": asking_for("torch", "float32.__class__"),
    "a path": asking_for("pathlib", "PosixPath"),
}


def refused_here(path: Path, tmp_path: Path) -> str:
    """The message with which one process refuses it; that nothing changed is checked, too."""
    job = Job("plain", perturbed=True)
    before = everything(job.updater)
    with pytest.raises(ms.CheckpointError) as caught:
        ms.load(path, job.updater)
    assert everything(job.updater) == before
    assert not (tmp_path / "ran").exists()
    assert "Nothing was changed." in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", PICKLES)
def test_code_in_an_index_is_not_run(name: str, sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / NAME)
    (tmp_path / NAME / ".metadata").write_bytes(PICKLES[name](tmp_path / "ran"))
    message = refused_here(tmp_path / NAME, tmp_path)
    assert "it asks for `" in message
    # These do run code where nobody looks.
    if name in {"a call", "os.mkdir"}:
        pickle.loads((tmp_path / NAME / ".metadata").read_bytes())
        assert (tmp_path / "ran").exists()


def edited_index(path: Path, change: Callable[[Any], None]) -> None:
    index = pickle.loads((path / ".metadata").read_bytes())
    change(index)
    (path / ".metadata").write_bytes(pickle.dumps(index))


KEY = "model/0.weight"


def set_place(index: Any, **changes: Any) -> None:
    for key, place in index.storage_data.items():
        if key.fqn == KEY:
            vars(place).update(changes)


# What an index says that torch would follow.
CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "an object instead of a tensor": (
        lambda index: index.state_dict_metadata.update({KEY: dcp_metadata.BytesStorageMetadata()}),
        f"`{KEY}` is no tensor",
    ),
    "a file elsewhere": (
        lambda index: set_place(index, relative_path="../bomb.distcp"),
        "is no file of this folder",
    ),
    "a place before the file": (lambda index: set_place(index, offset=-1), "holds no such place"),
    "a transformation": (
        lambda index: set_place(index, transform_descriptors=["zstd"]),
        "was transformed",
    ),
    "a part less": (
        lambda index: index.state_dict_metadata[KEY].chunks.pop(),
        f"parts of `{KEY}` are missing",
    ),
    "another dtype": (
        lambda index: setattr(index.state_dict_metadata[KEY].properties, "dtype", torch.float32),
        "or are of another dtype",
    ),
    "a tensor less": (lambda index: index.state_dict_metadata.pop(KEY), KEY),
    "another save": (
        lambda index: setattr(index.storage_meta, "save_id", "x"),
        "are not of one save",
    ),
    "no files": (lambda index: index.storage_data.clear(), "cannot be read as a checkpoint"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_index_that_says_something_else_is_refused(
    name: str, sound: Path, tmp_path: Path
) -> None:
    shutil.copytree(sound, tmp_path / NAME)
    (tmp_path / "bomb.distcp").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    change, message = CHANGES[name]
    edited_index(tmp_path / NAME, change)
    assert message in refused_here(tmp_path / NAME, tmp_path)


@pytest.mark.parametrize("file", ["rank-0.pt", "__0_0.distcp"])
def test_code_in_the_other_files_is_not_run(file: str, sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / NAME)
    (tmp_path / NAME / file).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    assert "cannot be read as a checkpoint" in refused_here(tmp_path / NAME, tmp_path)


def test_a_flipped_bit_in_a_tensor_is_refused(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / NAME)
    share = tmp_path / NAME / "__1_0.distcp"
    job = Job("plain")
    ms.load(sound, job.updater)
    numbers = job.weights()[0][4:].numpy().tobytes()  # the lower half, which the second rank wrote
    flipped = bytearray(share.read_bytes())
    flipped[flipped.index(numbers) + len(numbers) // 2] ^= 4
    share.write_bytes(flipped)
    assert "has changed since it was written" in refused_here(tmp_path / NAME, tmp_path)


@pytest.mark.parametrize("name", ["random", "cut"])
def test_an_index_of_random_bytes_or_cut_short_is_refused(
    name: str, sound: Path, tmp_path: Path
) -> None:
    shutil.copytree(sound, tmp_path / NAME)
    index = tmp_path / NAME / ".metadata"
    whole = index.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        length = int(torch.randint(0, len(whole), (), generator=generator))
        noise = bytes(torch.randint(0, 256, (40,), generator=generator).tolist())
        index.write_bytes(whole[:length] if name == "cut" else b"\x80\x04" + noise)
        refused_here(tmp_path / NAME, tmp_path)


def test_the_file_of_one_rank_alone_is_no_checkpoint(sound: Path, tmp_path: Path) -> None:
    assert "is no midstep checkpoint" in refused_here(sound / "rank-0.pt", tmp_path)
