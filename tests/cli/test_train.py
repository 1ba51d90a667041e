"""`midstep train` as its user meets it: what it prints, what it writes, what each option does."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from torch.nn import functional as F

import midstep as ms


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "tiny.py")


def records_of(folder: Path) -> list[ms.UpdateRecord]:
    text = (folder / "updates.jsonl").read_text()
    return [ms.UpdateRecord.from_json(line) for line in text.splitlines()]


def test_a_run_prints_its_summary_and_leaves_its_files(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert tiny.run("train", recipe, "--out", folder) == 0
    out, err = capsys.readouterr()
    assert err == ""
    records = records_of(folder)
    assert len(records) == 20
    norms = [record.grad_norm for record in records]
    assert "20 applied, 0 skipped, from 40 microbatches" in out
    assert f"mean {sum(norms) / 20:.4g}, largest {max(norms):.4g}" in out
    assert f"{sum(record.clipped for record in records) / 20:.1%} of applied updates" in out
    assert f"{sum(record.denominators['loss'] for record in records):,} in " in out
    assert "the baseline of guessing, 1.0986" in out
    assert out.splitlines()[-1].split() == ["written", "to", str(folder)]
    names = {"run.json", "updates.jsonl", "held_out.jsonl", "checkpoint.pt"}
    assert {path.name for path in folder.iterdir()} == names


def test_the_run_is_a_plain_loop_of_torch(recipe: Path, tmp_path: Path) -> None:
    tiny.write(recipe, ("torch.nn.Dropout(0.3)", "torch.nn.ReLU()"))
    assert tiny.run("train", recipe, "--steps", 8, "--out", tmp_path / "run") == 0
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    x, y = torch.randn(48, 4), torch.randint(0, 3, (48,))
    y[::7] = -100
    generator = torch.Generator().manual_seed(0)
    torch.empty((), dtype=torch.int64).random_(generator=generator)  # a loader's seed for workers
    order = torch.randperm(48, generator=generator)
    model.double()
    optimizer, norms, losses = torch.optim.AdamW(model.parameters(), lr=0.01), [], []
    for step in range(6):  # one pass: windows of 8 rows
        rows = order[8 * step : 8 * step + 8]
        decay = (1 + math.cos(math.pi * max(0, step - 1) / 6)) / 2
        optimizer.param_groups[0]["lr"] = 0.01 * (0.5 if step == 0 else decay)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows].double()), y[rows])
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        losses.append(loss.item())
        optimizer.step()
    records = records_of(tmp_path / "run")[:6]
    assert [record.loss_mean for record in records] == pytest.approx(losses, rel=1e-4)
    assert [record.grad_norm for record in records] == pytest.approx(norms, rel=1e-4)


def test_a_run_is_described_by_its_settings_and_versions(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert tiny.run("train", recipe, "--out", folder, "--steps", 4, "--seed", 7) == 0
    about = json.loads((folder / "run.json").read_text())
    assert about["options"] == {"steps": 4, "seed": 7}
    assert about["settings"]["seed"] == 7
    assert about["settings"]["size"] == 2
    assert about["settings"]["clip"] == "ByGlobalNorm(max_norm=0.5, p=2.0)"
    assert about["versions"]["torch"] == torch.__version__
    assert about["versions"]["midstep"] == ms.__version__
    assert about["recipe"] == str(recipe)
    assert about["baselines"] == {"guessing": 1.0986}


def test_runs_are_numbered_and_never_overwritten(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        assert tiny.run("train", recipe, "--steps", 4) == 0
        assert len(tiny.lines(tmp_path / "runs" / f"tiny-{number}")) == 4
    capsys.readouterr()
    folder = tmp_path / "runs" / "tiny-1"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert tiny.run("train", recipe, "--out", folder) == 2
    assert "holds a run already" in tiny.one_line(capsys)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_options_of_a_window_decide_what_is_in_it(recipe: Path, tmp_path: Path) -> None:
    def made(name: str, *options: object) -> list[ms.UpdateRecord]:
        assert tiny.run("train", recipe, "--steps", 3, "--out", tmp_path / name, *options) == 0
        return records_of(tmp_path / name)

    assert {r.num_microbatches for r in made("size", "--size", 3)} == {3}
    assert {r.num_microbatches for r in made("rows", "--rows", 2)} == {2}
    by_targets = made("targets", "--targets", 9)
    assert all(9 <= r.denominators["loss"] < 9 + 4 for r in by_targets)


def test_rate_clip_seed_and_precision_are_those_that_were_given(
    recipe: Path, tmp_path: Path
) -> None:
    common = ("--steps", 4, "--lr", 0.5, "--schedule", "constant")
    assert tiny.run("train", recipe, *common, "--clip", "none", "--out", tmp_path / "a") == 0
    assert tiny.run("train", recipe, *common, "--clip", 0.01, "--out", tmp_path / "b") == 0
    assert tiny.run("train", recipe, *common, "--seed", 5, "--out", tmp_path / "c") == 0
    assert tiny.run("train", recipe, *common, "--precision", "fp16", "--out", tmp_path / "d") == 0
    unclipped, clipped, seeded, scaled = (records_of(tmp_path / name) for name in "abcd")
    assert [record.lr for record in unclipped] == [[0.5]] * 4
    assert not any(record.clipped for record in unclipped)
    assert all(record.clipped for record in clipped)
    assert clipped[0].clip_coefficient == pytest.approx(0.01 / clipped[0].grad_norm)
    assert unclipped[0].loss_mean == clipped[0].loss_mean != seeded[0].loss_mean
    assert scaled[0].loss_scale == 2.0**16


def factor(shape: str, step: int) -> float:
    """The factor on the base rate by its formula, for 10 updates, 2 of warm-up, minimum 0.1."""
    if step < 2:
        return (step + 1) / 2
    share = min(1.0, (step + 1 - 2) / (10 - 2))
    late = min(1.0, max(0.0, (step + 1 - 8) / (10 - 8)))  # the last fifth
    return {
        "constant": 1.0,
        "linear": 0.1 + 0.9 * (1 - share),
        "cosine": 0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2,
        "wsd": 0.1 + 0.9 * (1 - late),
        "inverse-sqrt": max(0.1, math.sqrt(2 / (step + 1))),
    }[shape]


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "wsd", "inverse-sqrt"])
def test_the_rate_follows_the_schedule_that_was_named(
    recipe: Path, tmp_path: Path, shape: str
) -> None:
    minimum = () if shape == "constant" else ("--minimum", 0.1)
    code = tiny.run(
        *("train", recipe, "--out", tmp_path / "run", "--lr", 0.5, "--steps", 10),
        *("--schedule", shape, "--warmup", 2, *minimum),
    )
    assert code == 0
    rates = [record.lr[0] for record in records_of(tmp_path / "run")]
    assert rates == pytest.approx([0.5 * factor(shape, step) for step in range(10)])


def test_held_out_losses_come_at_intervals_and_at_the_end(recipe: Path, tmp_path: Path) -> None:
    assert tiny.run("train", recipe, "--out", tmp_path / "run", "--evaluate-every", 8) == 0
    assert [line["step"] for line in tiny.lines(tmp_path / "run", "held_out.jsonl")] == [8, 16, 20]


def test_how_often_a_run_is_measured_and_saved_changes_nothing_in_it(
    recipe: Path, tmp_path: Path
) -> None:
    seldom, often = tmp_path / "seldom", tmp_path / "often"
    for folder, interval in ((seldom, 20), (often, 1)):
        options = ("--evaluate-every", interval, "--save-every", interval)
        assert tiny.run("train", recipe, "--out", folder, *options) == 0
    assert tiny.lines(seldom) == tiny.lines(often)
    ours, theirs = tiny.weights(seldom), tiny.weights(often)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_recipe_without_held_out_batches_trains_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny.write(tmp_path / "tiny.py", ("held_out=[(x[:8], y[:8])],", ""))
    assert tiny.run("train", path, "--out", tmp_path / "run") == 0
    assert re.search(r"held-out loss +not measured", capsys.readouterr().out)
    assert not (tmp_path / "run" / "held_out.jsonl").exists()


def test_skipped_updates_are_said_recorded_and_counted_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny.write(tmp_path / "tiny.py", ("y[::7] = -100", "y[::7] = -100; x[5] = float('nan')"))
    folder = tmp_path / "run"
    assert tiny.run("train", path, "--out", folder, "--skip-nonfinite", 3, "--steps", 12) == 0
    out = capsys.readouterr().out
    skipped = [record for record in records_of(folder) if not record.applied]
    assert skipped
    assert len(records_of(folder)) == 12 + len(skipped)
    assert f"12 applied, {len(skipped)} skipped ({len(skipped)} nonfinite)" in out
    for record in skipped:
        assert str(record) in out


def test_the_module_is_the_command_too(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "midstep", "--version"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert process.stdout == f"midstep {ms.__version__}\n"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("language", "the baseline of byte frequencies"),
        ("digits", "BatchNorm normalises the rows of one forward"),
        ("pairs", "The loss compares the rows of one forward"),
    ],
)
def test_a_built_in_recipe_trains_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    if name == "digits":
        pytest.importorskip("sklearn")
    options = ("--steps", 1, "--size", 1, "--out", tmp_path / "run")
    assert tiny.run("train", name, *options) == 0
    assert words in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "run.json").read_text())["recipe"] == name
