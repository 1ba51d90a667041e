"""torchrun itself: its processes find each other, one speaks, and a signal saves the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from distributed.commands import PLAIN, assert_same_run

pytestmark = pytest.mark.distributed


def torchrun(*arguments: object, cwd: Path) -> subprocess.Popen[str]:
    # `--standalone` finds a free port, so that two may run at a time.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.Popen(
        [*command, "--nproc-per-node", "2", "-m", "midstep", "train", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_the_built_in_recipe_is_the_run_of_one_process(tmp_path: Path) -> None:
    options = ("language", "--steps", 3, "--evaluate-every", 3)
    process = torchrun(*options, "--out", "two", "--parallel", "ddp", cwd=tmp_path)
    assert tiny.run("train", *options, "--out", tmp_path / "one") == 0
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.splitlines()[0] == "two: 3 updates on 2 ranks"
    assert out.count("written to") == out.count("update 1 applied") == 1
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_a_bad_option_is_one_line_and_ends_every_rank_with_2(tmp_path: Path) -> None:
    out, err = torchrun("language", "--steps", 0, "--parallel", "ddp", cwd=tmp_path).communicate()
    lines = [line for line in err.splitlines() if line.startswith("midstep: ")]
    assert lines == ["midstep: `--steps 0`: must be at least 1."]
    ends = [line.split()[2] for line in err.splitlines() if line.strip().startswith("exitcode")]
    assert ends == ["2", "2"]
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_signal_to_torchrun_saves_the_run_which_one_process_finishes(tmp_path: Path) -> None:
    recipe = tiny.write(tmp_path / "tiny.py", PLAIN, tiny.SLOW)
    options = (recipe, "--evaluate-every", 20)
    broken = tmp_path / "broken"
    process = torchrun(*options, "--out", broken, "--parallel", "fsdp", cwd=tmp_path)
    tiny.wait_for_updates(broken, 3)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    done = len(tiny.lines(broken))
    assert f"stopped after {done} of 20 updates, and saved" in err
    assert err.count("midstep: ") == 1
    assert tiny.run("train", *options, "--out", tmp_path / "straight") == 0
    assert tiny.run("train", "--resume", broken) == 0
    assert_same_run(tmp_path / "straight", broken)
