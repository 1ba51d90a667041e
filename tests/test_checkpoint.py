"""Checkpoints: the continued run is the uninterrupted run, and a bad file changes nothing."""

import copy
import io
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loop import classifier, distance, loss_sum, pairs, weights
from resuming import Run, bits, seed_all
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.optim.swa_utils import AveragedModel

import midstep as ms

GOOD = pairs(3, 4, dtype=torch.float32)


def update(updater: ms.Updater) -> ms.UpdateRecord:
    return updater.update(GOOD, loss_sum, count=ms.targets())


def everything(updater: ms.Updater) -> object:
    """All that a load may change, to the bit."""
    average: Any = updater.averaged_model
    return bits(
        [
            updater.model.state_dict(),
            None if average is None else average.state_dict(),
            updater.optimizer.state_dict(),
            updater.rates.state_dict(),
            updater.loss_scale.state_dict(),
            updater.clip.state_dict(),
            updater.state_dict()["clock"],
            torch.get_rng_state(),
            list(random.getstate()[1]),
            np.random.get_state()[1].tobytes(),  # type: ignore[index] # noqa: NPY002
        ]
    )


# -- the continued run ---------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": ms.BF16()},
    "float16 that overflows": {"precision": ms.FP16(init_scale=2.0**22, growth_interval=2)},
    "SGD": {"optimizer": "SGD"},
    "Adafactor": {"optimizer": "Adafactor"},
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_continued_run_is_the_uninterrupted_run(name: str, stop: int, tmp_path: Path) -> None:
    whole = Run.made(**RUNS[name])
    list(whole.windows_left(2))
    expected = whole.outcome()
    if "overflows" in name:
        assert not all(record.applied for record in whole.records)
    first = Run.made(**RUNS[name])
    steps = first.windows_left(2)
    for _ in range(stop):
        next(steps)
    first.save(tmp_path / "checkpoint.pt")
    second = Run.made(**RUNS[name], seed=99)
    second.records = first.records
    ms.load(tmp_path / "checkpoint.pt", second.updater)
    list(second.windows_left(2))
    assert second.outcome() == expected


LIVES = """
import os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
import midstep as ms
from resuming import Run

folder = Path(sys.argv[2])
chance = random.Random(int(sys.argv[3]))

def live():
    run = Run.made(seed=os.getpid())
    path = folder / "checkpoint.pt"
    if path.exists():
        ms.load(path, run.updater)
    else:
        run = Run.made()
    log = ms.JsonLines(folder / "updates.jsonl")
    log.rewind(run.updater.clock.update)
    run.updater._books.sinks.append(log)
    for record in run.windows_left(4):
        run.save(path)
    torch.save(run.updater.model.state_dict(), folder / "weights.pt")

kills = 0
while True:
    child = os.fork()
    if child == 0:
        live()
        os._exit(0)
    deadline = time.monotonic() + chance.uniform(0.0, 0.12)
    done = (0, 0)
    while time.monotonic() < deadline and not done[0]:
        done = os.waitpid(child, os.WNOHANG)
        time.sleep(0.001)
    if not done[0]:
        if kills < int(sys.argv[4]):
            os.kill(child, signal.SIGKILL)
            kills += 1
        done = os.waitpid(child, 0)
    if os.WIFEXITED(done[1]):
        assert os.WEXITSTATUS(done[1]) == 0, done
        break
print(kills)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_killed_at_any_moment_and_continued_is_the_uninterrupted_run(
    seed: int, tmp_path: Path
) -> None:
    """A real process, killed again and again: in the step, in the save, in the load."""
    whole = Run.made()
    list(whole.windows_left(4))
    done = subprocess.run(
        [sys.executable, "-c", LIVES, str(Path(__file__).parent), str(tmp_path), str(seed), "25"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 5
    killed = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert bits(killed) == bits(whole.updater.model.state_dict())
    lines = (tmp_path / "updates.jsonl").read_text(encoding="utf-8").splitlines()
    log = [ms.UpdateRecord.from_json(line) for line in lines]
    assert [(r.update, r.loss_mean, r.grad_norm, r.lr) for r in log] == [
        (r.update, r.loss_mean, r.grad_norm, r.lr) for r in whole.records
    ]


def test_extra_comes_back_and_is_read_without_running_code(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "checkpoint.pt"
    run = Run.made()
    extra = {"best": 0.25, "names": ["a", "b"], "held": torch.ones(2), "at": (1, None, True)}
    ms.save(path, run.updater, extra=extra)
    assert bits(ms.load(path, run.updater)) == bits(extra)
    content = torch.load(path, weights_only=True)
    assert bits(content["model"]) == bits(run.updater.model.state_dict())
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["checkpoint.pt"]


@pytest.mark.parametrize(
    "extra",
    [{"a": object()}, {"a": [Path("x")]}, {"a": np.float64(1.0)}, {"a": ms.Verdict.APPLIED}],
)
def test_what_a_safe_load_could_not_read_back_is_refused_at_once(
    extra: dict[str, Any], tmp_path: Path
) -> None:
    run = Run.made()
    with pytest.raises(TypeError, match=r"state at `\['extra'\]\['a'\]"):
        ms.save(tmp_path / "checkpoint.pt", run.updater, extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_cannot_be_saved_inside_a_window(tmp_path: Path) -> None:
    run = Run.made()
    windows = run.updater.windows(run.loader, size=2)
    next(windows)
    with pytest.raises(ms.WindowError, match="inside a window"):
        run.save(tmp_path / "checkpoint.pt")
    assert list(tmp_path.iterdir()) == []
    windows.close()  # type: ignore[attr-defined]


class Averages:
    """An average that is no module."""

    def update_parameters(self, model: nn.Module) -> None:
        """Keep nothing."""


def test_an_average_that_could_not_be_saved_is_refused(tmp_path: Path) -> None:
    model = classifier(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = ms.Updater(model, optimizer, averaged_model=Averages())
    update(updater)
    with pytest.raises(TypeError, match=r"no `nn\.Module`, so its average would be lost"):
        ms.save(tmp_path / "checkpoint.pt", updater)


# -- names ---------------------------------------------------------------------------------------


def trained(model: nn.Module, **stages: Any) -> ms.Updater:
    updater = ms.Updater(model, torch.optim.AdamW(model.parameters(), lr=0.01), **stages)
    for _ in range(2):
        update(updater)
    return updater


@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_compiled_run_goes_on_uncompiled_and_back(compiled_first: bool, tmp_path: Path) -> None:
    def made(*, compiled: bool, seed: int) -> tuple[nn.Module, ms.Updater]:
        model = classifier(torch.float32, seed)
        wrapped: Any = torch.compile(model, backend="eager") if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, ms.Updater(wrapped, optimizer, averaged_model=AveragedModel(model))

    one, first = made(compiled=compiled_first, seed=0)
    first.optimizer.step()
    ms.save(tmp_path / "checkpoint.pt", first)
    other, second = made(compiled=not compiled_first, seed=1)
    ms.load(tmp_path / "checkpoint.pt", second)
    assert distance(weights(one), weights(other)) == 0.0


class Clashing(nn.Module):
    """Whose parameter and submodule would get one name if a prefix were cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 1.0))
        self.module = nn.Module()
        self.module.weight = nn.Parameter(torch.full((2,), 2.0))


def test_names_that_would_become_one_are_kept_apart(tmp_path: Path) -> None:
    model = Clashing()
    ms.save(tmp_path / "c.pt", ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    other = Clashing()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    ms.load(tmp_path / "c.pt", ms.Updater(other, torch.optim.SGD(other.parameters(), lr=0.1)))
    assert [p.tolist() for p in other.parameters()] == [[1.0, 1.0], [2.0, 2.0]]


def test_tied_weights_and_state_beside_tensors_come_back(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight
            self.note = "new"

        def get_extra_state(self) -> Any:
            return {"note": self.note}

        def set_extra_state(self, state: Any) -> None:
            self.note = state["note"]

    first, second = Tied(), Tied()
    first.note = "trained"
    ms.save(tmp_path / "c.pt", ms.Updater(first, torch.optim.SGD(first.parameters(), lr=0.1)))
    ms.load(tmp_path / "c.pt", ms.Updater(second, torch.optim.SGD(second.parameters(), lr=0.1)))
    assert torch.equal(first.a.weight, second.b.weight)
    assert second.b.weight is second.a.weight
    assert second.note == "trained"


# -- a checkpoint of something else --------------------------------------------------------------


def saved(path: Path) -> None:
    model = classifier(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    updater = ms.Updater(
        model, optimizer, clip=ms.ByGlobalNorm(1.0), schedule=StepLR(optimizer, 1, 0.5)
    )
    update(updater)
    ms.save(path, updater)


def other(**changes: Any) -> ms.Updater:
    """The updater of `saved` but for what is changed."""
    model = changes.pop("model", None) or classifier(torch.float32, seed=1)
    kind = changes.pop("optimizer", torch.optim.AdamW)
    groups = changes.pop("groups", lambda m: list(m.parameters()))
    optimizer = kind(groups(model), lr=0.03)
    schedule = changes.pop("schedule", lambda o: StepLR(o, 1, 0.5))(optimizer)
    return ms.Updater(
        model, optimizer, **({"clip": ms.ByGlobalNorm(1.0), "schedule": schedule} | changes)
    )


def wider() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))


def deeper() -> nn.Sequential:
    return nn.Sequential(*classifier(torch.float32), nn.Linear(3, 3))


def average() -> AveragedModel:
    return AveragedModel(classifier(torch.float32))


OTHERS: dict[str, tuple[Callable[[], ms.Updater], str]] = {
    "shape": (lambda: other(model=wider()), r"another model: `0.bias` is float32\[6\] there"),
    "names": (lambda: other(model=deeper()), "`3.bias` is only in this run"),
    "dtype": (lambda: other(model=classifier(torch.float64)), r"float32\[6, 4\] there and float64"),
    "optimizer": (lambda: other(optimizer=torch.optim.SGD), "optimizer `AdamW`, and this run has"),
    "groups": (
        lambda: other(
            groups=lambda m: [{"params": m[0].parameters()}, {"params": m[2].parameters()}]
        ),
        r"saved with \[4\] parameters in the optimizer's groups, and this run has \[2, 2\]",
    ),
    "order": (
        lambda: other(groups=lambda m: list(m.parameters())[::-1]),
        "has `0.weight` where group 0 of this run's optimizer has `2.bias`",
    ),
    "precision": (lambda: other(precision=ms.FP16()), "precision `FP32`, and this run has `FP16`"),
    "clip rule": (lambda: other(clip=ms.ByValue(1.0)), "clip rule `ByGlobalNorm`, and this run"),
    "chain": (
        lambda: other(clip=ms.Chain(ms.ByGlobalNorm(1.0), ms.ByValue(1.0))),
        r"this run has `Chain\(ByGlobalNorm, ByValue\)`",
    ),
    "schedule": (
        lambda: other(schedule=lambda o: LambdaLR(o, lambda _: 1.0)),
        "schedule `StepLR`, and this run has `LambdaLR`",
    ),
    "no schedule": (lambda: other(schedule=lambda _: None), "this run has `none`"),
    "average": (lambda: other(averaged_model=average()), "another averaged model"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_run_is_refused_and_nothing_changed(
    name: str, tmp_path: Path
) -> None:
    saved(tmp_path / "checkpoint.pt")
    make, message = OTHERS[name]
    updater = make()
    before = everything(updater)
    with pytest.raises(ms.CheckpointError, match=message):
        ms.load(tmp_path / "checkpoint.pt", updater)
    assert everything(updater) == before


@pytest.mark.parametrize("change", ["schema", "no schema", "format", "no format", "a list"])
def test_a_file_of_another_schema_or_format_is_refused(change: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    saved(path)
    content = torch.load(path, weights_only=True)
    if change == "a list":
        content = [content]
    elif change.startswith("no "):
        del content[change.removeprefix("no ")]
    else:
        content[change] = 99
    torch.save(content, path)
    updater = other()
    before = everything(updater)
    message = "schema" if "schema" in change else "no midstep checkpoint"
    with pytest.raises(ms.CheckpointError, match=message):
        ms.load(path, updater)
    assert everything(updater) == before


def test_a_state_that_does_not_fit_its_stage_is_refused_and_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    run = Run.made()
    steps = run.windows_left(1)
    next(steps)
    run.save(path)
    content = torch.load(path, weights_only=True)
    del content["updater"]["clock"]["step"]
    torch.save(content, path)
    before = everything(run.updater)
    with pytest.raises(ms.CheckpointError, match="does not fit this updater"):
        ms.load(path, run.updater)
    assert everything(run.updater) == before
    whole = Run.made()
    list(whole.windows_left(1))
    torch.set_rng_state(torch.load(path, weights_only=True)["random"]["torch_cpu"])
    next(steps)  # and the pass that is open goes on where it was
    assert run.records[1].loss_mean == whole.records[1].loss_mean
    assert run.updater.state_dict()["cursor"]["num_batches"] == 6


# -- files that are no checkpoint ----------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "checkpoint.pt"
    saved(path)
    return path.read_bytes()


def refused(content: bytes, tmp_path: Path) -> str:
    """The message with which a file is refused; that nothing changed is checked on the way."""
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(content)
    updater = other()
    before = everything(updater)
    with pytest.raises(ms.CheckpointError) as caught:
        ms.load(path, updater)
    assert everything(updater) == before
    return str(caught.value)


@given(share=st.floats(0, 1, exclude_max=True))
@settings(max_examples=25)
def test_a_file_cut_short_is_refused(
    share: float, sound: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    refused(sound[: int(share * len(sound))], tmp_path_factory.mktemp("cut"))


@given(content=st.binary(max_size=200))
@settings(max_examples=60)
def test_random_bytes_are_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    refused(content, tmp_path_factory.mktemp("bytes"))


@given(content=st.binary(max_size=60))
@settings(max_examples=40)
def test_random_pickles_are_refused(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    refused(b"\x80\x02" + content, tmp_path_factory.mktemp("pickles"))


@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=40)
def test_a_flipped_bit_is_refused_or_harmless(
    share: float, bit: int, sound: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also in the middle of the weights, where `torch.load` would not notice."""
    path = tmp_path_factory.mktemp("flipped") / "checkpoint.pt"
    flipped = bytearray(sound)
    flipped[int(share * len(sound))] ^= 1 << bit
    path.write_bytes(flipped)
    whole = tmp_path_factory.mktemp("whole") / "checkpoint.pt"
    whole.write_bytes(sound)
    updater, expected = other(), other()
    ms.load(whole, expected)
    seed_all(3)
    before = everything(updater)
    try:
        ms.load(path, updater)
    except ms.CheckpointError:
        assert everything(updater) == before
        return
    ms.load(whole, expected)
    assert everything(updater) == everything(expected)


def test_a_file_has_checksums_whatever_the_program_told_torch(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        saved(tmp_path / "checkpoint.pt")
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    ms.load(tmp_path / "checkpoint.pt", other())


class Bomb:
    """What runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("by", ["torch", "pickle"])
def test_code_in_a_file_is_not_run(by: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    buffer = io.BytesIO()
    if by == "torch":
        torch.save({"format": "midstep checkpoint", "schema": 1, "x": Bomb(mark)}, buffer)
    else:
        pickle.dump(Bomb(mark), buffer)
    assert "cannot be read as a checkpoint" in refused(buffer.getvalue(), tmp_path)
    assert not mark.exists()


def test_other_things_saved_with_torch_are_refused(tmp_path: Path) -> None:
    for thing in ({}, {"model": torch.ones(2)}, torch.ones(3), [1, 2], "text", None):
        buffer = io.BytesIO()
        torch.save(thing, buffer)
        assert "no midstep checkpoint" in refused(buffer.getvalue(), tmp_path)


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    updater = other()
    before = everything(updater)
    with pytest.raises(ms.CheckpointError, match="cannot be read"):
        ms.load(tmp_path, updater)
    with pytest.raises(ms.CheckpointError, match="there is no such checkpoint"):
        ms.load(tmp_path / "checkpoint.pt", updater)
    assert everything(updater) == before


# -- disks ---------------------------------------------------------------------------------------

FULL_DISK = """
import resource, signal, sys
sys.path.insert(0, sys.argv[1])
import midstep as ms
from resuming import Run
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = sys.argv[2]
run = Run.made()
steps = run.windows_left(2)
next(steps)
ms.save(path, run.updater)
next(steps)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    ms.save(path, run.updater)
except ms.CheckpointError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs file size limits")
@pytest.mark.parametrize("limit", [0, 20_000])
def test_a_full_disk_leaves_the_checkpoint_before_whole(limit: int, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(Path(__file__).parent), str(path), str(limit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "could not be written" in done.stdout
    assert "The checkpoint saved before, if any, is whole" in done.stdout
    run = Run.made(seed=1)
    ms.load(path, run.updater)
    assert run.updater.clock.update == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_path_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    run = Run.made()
    with pytest.raises(ms.CheckpointError, match="could not be written"):
        run.save(tmp_path / "file" / "checkpoint.pt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ms.CheckpointError, match="could not be written"):
        run.save(tmp_path / "folder")
    assert list((tmp_path / "folder").iterdir()) == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]


def test_what_an_interrupted_save_left_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt.part").write_bytes(b"half")
    run = Run.made()
    run.save(tmp_path / "checkpoint.pt")
    ms.load(tmp_path / "checkpoint.pt", Run.made(seed=1).updater)
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_the_loaded_state_is_the_updaters_own(tmp_path: Path) -> None:
    """Two runs loaded from one file do not share a tensor or a list."""
    saved(tmp_path / "checkpoint.pt")
    one, two = other(), other()
    ms.load(tmp_path / "checkpoint.pt", one)
    ms.load(tmp_path / "checkpoint.pt", two)
    before = copy.deepcopy(everything(two))
    seed_all(1)
    update(one)
    torch.set_rng_state(
        torch.load(tmp_path / "checkpoint.pt", weights_only=True)["random"]["torch_cpu"]
    )
    ms.load(tmp_path / "checkpoint.pt", two)
    assert everything(two) == before


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6])
def test_a_bit_flipped_in_a_tensor_is_named_and_changes_nothing(
    share: float, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.pt"
    weight = torch.nn.Linear(64, 64)
    updater = ms.Updater(weight, torch.optim.SGD(weight.parameters(), lr=0.1))
    ms.save(path, updater)
    content = bytearray(path.read_bytes())
    start = bytes(content).index(weight.weight.detach().numpy().tobytes())
    content[start + int(share * weight.weight.numel()) * 4] ^= 1
    path.write_bytes(content)
    before = weight.weight.detach().clone()
    with pytest.raises(ms.CheckpointError, match="cannot be read as a checkpoint"):
        ms.load(path, updater)
    assert torch.equal(weight.weight, before)
