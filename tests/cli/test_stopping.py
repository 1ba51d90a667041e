"""Ctrl-C and SIGTERM end a run well, a second one at once, and a reader who left ends it, too."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from midstep.cli.stopping import Stop


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_saves_and_the_command_it_names_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: str, code: int
) -> None:
    asks = tiny.at_microbatch(5, f"os.kill(os.getpid(), signal.{number})")
    path = tiny.write(tmp_path / "tiny.py", asks, tiny.COUNTING)
    folder = tmp_path / "a run"
    assert tiny.run("train", path, "--out", folder) == code
    err = capfd.readouterr().err
    assert "Traceback" not in err
    notice, last = err.splitlines()
    assert "once more stops at once" in notice
    done = len(tiny.lines(folder))
    assert f"stopped after {done} of 20 updates, and saved" in last
    path.write_text(tiny.RECIPE)
    command = shlex.split(last.partition("Go on with: ")[2])
    assert command[-3:] == ["train", "--resume", str(folder)]
    assert tiny.run(*command[-3:]) == 0
    assert len(tiny.lines(folder)) == 20


def test_a_stop_in_the_last_update_is_a_finished_run(tmp_path: Path) -> None:
    path = tiny.write(
        tmp_path / "tiny.py",
        tiny.at_microbatch(8, "os.kill(os.getpid(), signal.SIGINT)"),
        tiny.COUNTING,
        ("held_out=[(x[:8], y[:8])],", ""),
    )
    assert tiny.run("train", path, "--out", tmp_path / "run", "--steps", 4) == 0


def test_a_second_signal_ends_it_at_once_and_what_was_saved_is_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    twice = "os.kill(os.getpid(), signal.SIGINT), os.kill(os.getpid(), signal.SIGINT)"
    path = tiny.write(tmp_path / "tiny.py", tiny.at_microbatch(16, twice), tiny.COUNTING)
    folder = tmp_path / "run"
    assert tiny.run("train", path, "--out", folder, "--save-every", 4) == 130
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert "interrupted. The run is saved as it was after 4 updates" in err
    assert len(tiny.lines(folder)) > 4
    path.write_text(tiny.RECIPE)
    assert tiny.run("train", "--resume", folder) == 0
    assert len(tiny.lines(folder)) == 20


def test_an_interrupt_before_the_first_update_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tiny.write(tmp_path / "tiny.py", ("torch.manual_seed(seed)", "raise KeyboardInterrupt"))
    assert tiny.run("train", path, "--out", tmp_path / "run") == 130
    assert capfd.readouterr().err == "midstep: interrupted.\n"
    assert not (tmp_path / "run").exists()


def test_the_handlers_of_before_return() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stop = Stop()
    with stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
    assert stop.signal is signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_reader_who_leaves_ends_the_run_in_one_line(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "tiny.py", tiny.SLOW)
    command = [sys.executable, "-m", "midstep", "train", path, "--out", tmp_path / "run"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 2
    assert err.startswith("midstep: nobody reads its output any more.")
    assert len(err.splitlines()) == 1
