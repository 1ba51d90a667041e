"""Whole comparisons of a recipe that trains in milliseconds, in real processes."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny

import midstep as ms
from midstep.cli.options import Options
from midstep.comparing import Grid, cells_of
from midstep.comparing.cell import Ending, ending_of

BREAKS_AT_A_LARGE_RATE = (
    tiny.LOSS,
    "ms.cross_entropy(model(batch[0]) * 1e3, batch[1])",
)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return str(tiny.write(tmp_path / "mine.py"))


def test_a_comparison_trains_each_cell_as_the_command_would_and_never_twice(
    recipe: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    found = ms.compare(recipe, {"clip": [math.inf, 0.01]}, out=out, steps=8, num_seeds=2, jobs=2)
    assert {row.variant for row in found.rows} == {"clip=none", "clip=0.01"}
    clipped = next(row for row in found.rows if row.variant == "clip=0.01")
    assert clipped.clipped == 1.0
    assert clipped.least_coefficient < 1.0
    assert clipped.norms[0] <= clipped.norms[1] <= clipped.norms[2]
    # The same run by `midstep train`.
    alone = tmp_path / "alone"
    assert (
        tiny.run(
            "train", recipe, "--clip", "0.01", "--steps", "8", "--seed", "1", "--out", str(alone)
        )
        == 0
    )
    last = [json.loads(line) for line in (alone / "held_out.jsonl").read_text().splitlines()][-1]
    assert clipped.held_out[1] == last["loss_mean"]
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.jsonl")}
    again = ms.compare(recipe, {"clip": [math.inf, 0.01]}, out=out, steps=8, num_seeds=2, jobs=2)
    assert again == found
    # Runs of other settings are not taken for these.
    with pytest.raises(ValueError, match="`steps` 8, not 6"):
        ms.compare(recipe, {"clip": [0.01]}, out=out, steps=6, num_seeds=1)
    Path(recipe).write_text(Path(recipe).read_text() + "\n# edited\n")
    with pytest.raises(ValueError, match="was edited"):
        ms.compare(recipe, {"clip": [0.01]}, out=out, steps=8, num_seeds=1)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.jsonl")} == before


def test_a_run_that_is_lost_is_stopped_and_told(tmp_path: Path) -> None:
    recipe = str(tiny.write(tmp_path / "wild.py", BREAKS_AT_A_LARGE_RATE))
    found = ms.compare(
        recipe, {"lr": [1e-3, 1e20]}, out=tmp_path / "out", steps=60, num_seeds=1, jobs=2
    )
    assert [row.num_lost for row in found.rows] == [0, 1]
    assert found.rows[1].mean == math.inf
    ending = ending_of(tmp_path / "out" / "lr=1e+20" / "seed-0")
    assert ending in (Ending.NONFINITE, Ending.BLEW_UP)


def test_a_comparison_that_is_killed_takes_its_runs_along_and_goes_on_to_the_same_outcome(
    tmp_path: Path,
) -> None:
    slow = ("ms.cross_entropy(", "__import__('time').sleep(0.01) or ms.cross_entropy(")
    recipe = str(tiny.write(tmp_path / "slow.py", slow))
    arguments = ["compare", recipe, "--vary", "lr=0.01,0.02", "--seeds", "1", "--steps", "20"]
    whole = tmp_path / "whole"
    assert tiny.run(*arguments, "--jobs", "2", "--out", str(whole)) == 0
    parts = tmp_path / "parts"
    process = subprocess.Popen(
        [sys.executable, "-m", "midstep", *arguments, "--jobs", "1", "--out", str(parts)],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not list(parts.rglob("updates.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()  # it alone; the run that it began is not asked
    process.wait()
    assert tiny.run(*arguments, "--jobs", "2", "--out", str(parts)) == 0

    def losses(out: Path) -> list[tuple[str, list[float]]]:
        rows = json.loads((out / "comparison.json").read_text())["rows"]
        return [(row["variant"], row["held_out"]) for row in rows]

    assert losses(parts) == losses(whole)
    for path in parts.rglob("updates.jsonl"):
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        assert steps == list(range(1, 21))
    page = (parts / "comparison.html").read_text()
    assert "vega" in page
    assert "<td>lr=0.02</td>" in page
    assert "Each was trained on" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vary", "lr"], "NAME=VALUE"),
        (["--vary", "lr=1,2", "--vary", "lr=3"], "names an option twice"),
        (["--vary", "lr=1,2", "--lr", "3"], "both varied and given"),
        (["--vary", "lr=-1,2"], "greater than 0"),
        (["--vary", "size=0,1"], "at least 1"),
        (["--vary", "targets=0,5"], "at least 1"),
        (["--vary", "lr=1,2", "--seeds", "0"], "at least 1"),
        (["--vary", "lr=1,2", "--jobs", "0"], "at least 1"),
        (["--vary", "warmup=1,2"], "without `--schedule`"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_runs_nothing(
    recipe: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    out = tmp_path / "out"
    assert tiny.run("compare", recipe, *arguments, "--out", str(out)) == 2
    assert words in tiny.one_line(capsys)
    assert not list(out.rglob("*.jsonl"))


def test_a_recipe_without_held_out_batches_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(tiny.write(tmp_path / "blind.py", ("held_out=[(x[:8], y[:8])],", "")))
    assert tiny.run("compare", recipe, "--vary", "lr=1,2", "--out", str(tmp_path / "out")) == 2
    assert "nothing to compare by" in tiny.one_line(capsys)


def test_variants_of_unequal_windows_see_as_many_targets(recipe: str, tmp_path: Path) -> None:
    def steps(axes: dict[str, list[int]]) -> list[int | None]:
        base = Options(steps=12)
        grid = Grid(recipe=recipe, axes=axes, base=base, num_seeds=1, path=tmp_path)
        return [cell.options.steps for cell in cells_of(grid)]

    assert steps({"targets": [8, 16, 32]}) == [12, 6, 3]
    assert steps({"size": [1, 2, 4]}) == [24, 12, 6]  # the recipe's own is 2
    assert steps({"rows": [1, 2]}) == [12, 12]  # pieces of the same batches
