"""What is shown while a run goes on: a live display on a terminal, plain lines elsewhere."""

import io
import math
import os
import pty
import sys
from pathlib import Path

import pytest
import tiny
from rich.console import Console

import midstep as ms
from midstep.cli.sparkline import Sparkline
from midstep.cli.stopping import Stop
from midstep.cli.watching import Live, Pace, Plain, watch_of
from midstep.recipes.held_out import HeldOut


def record(step: int, **given: object) -> ms.UpdateRecord:
    fields: dict[str, object] = {
        "update": step,
        "step": step,
        "verdict": ms.Verdict.APPLIED,
        "num_microbatches": 1,
        "denominators": {"lm": 300, "aux": 2},
        "loss_means": {"lm": 2.5},
        "loss_mean": 2.5,
        "grad_norm": 1.5,
        "clip_coefficient": 0.5,
        "clipped": True,
        "lr": [0.003, 0.1],
        "loss_scale": 1.0,
        "num_nonfinite": 0,
        "seconds": 0.25,
    }
    return ms.UpdateRecord(**{**fields, **given})  # type: ignore[arg-type]


HELD_OUT = HeldOut(
    step=7, update=7, loss_mean=2.25, loss_means={"lm": 2.25}, denominators={"lm": 1}, seconds=0.1
)


def test_the_pace_is_that_of_the_last_updates_and_of_the_first_term() -> None:
    pace = Pace(steps=100, step=0)
    assert (pace.targets_per_second(), pace.seconds_left()) == (0.0, None)
    for step in range(1, 31):
        pace.add(record(step, seconds=30.0 if step < 11 else 0.25))
    assert pace.targets_per_second() == 300 / 0.25
    left = pace.seconds_left()
    assert left is not None
    assert 0.0 <= left < 1.0


def test_time_left_counts_only_updates_of_this_process() -> None:
    pace = Pace(steps=100, step=90)
    pace._started -= 6.0
    pace._last -= 6.0
    for step in (91, 92, 93):
        pace.add(record(step))
    assert pace.seconds_left() == pytest.approx(7 * 2.0, abs=0.5)


def test_plain_lines_are_few_but_skipped_updates_have_theirs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = Plain(steps=400, step=0)
    for step in range(1, 401):
        plain.on_update(record(step))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 21
    assert lines[0].startswith("update 1 applied | loss 2.5000 | norm 1.500 clipped x0.500 | lr")
    assert "1,200 targets/s" in lines[-1]
    assert "0:00 left" in lines[-1]
    plain.on_update(record(401, verdict=ms.Verdict.SKIPPED_NONFINITE))
    plain.on_held_out(HELD_OUT)
    assert capsys.readouterr().out.splitlines()[1] == "held-out loss 2.2500 after 7 updates"


def console(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def shown(live: Live, width: int = 100) -> list[str]:
    screen = console(width)
    screen.print(live)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_display_is_two_lines_with_every_fact(width: int) -> None:
    live = Live("run", 1000, 0, Stop(), console())
    assert shown(live, width)[1].startswith("first update")
    live.on_update(record(40))
    first, second = shown(live, width)
    assert first.startswith("run ")
    assert "40/1,000" in first
    assert first.rstrip().endswith("left")
    for fact in ("loss 2.500", "norm 1.500 clipped", "rate 3.00e-03"):
        assert fact in second
    assert "1,200 targets/s" in second or width < 65


def test_what_is_worth_keeping_leaves_a_line() -> None:
    screen = console()
    live = Live("run", 1000, 0, Stop(), screen)
    live.on_update(record(1))
    live.on_update(record(1, verdict=ms.Verdict.SKIPPED_SPIKE, grad_norm=9.0))
    live.on_held_out(HELD_OUT)
    assert isinstance(screen.file, io.StringIO)
    lines = screen.file.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("update 1 skipped (spike)")
    assert lines[1] == "held-out loss 2.2500 after 7 updates"


def test_a_request_to_stop_shows_in_the_display() -> None:
    stop = Stop()
    live = Live("run", 10, 0, stop, console())
    stop._on_signal(2, None)
    assert "once more stops at once" in shown(live)[1]


def test_an_empty_window_shows_no_loss() -> None:
    live = Live("run", 10, 0, Stop(), console())
    live.on_update(record(1, loss_mean=None, grad_norm=None, denominators={}))
    assert "loss -   norm -" in shown(live)[1]


def test_elsewhere_than_on_a_terminal_the_stop_speaks_for_itself() -> None:
    stop = Stop()
    assert isinstance(watch_of("run", 10, 0, stop), Plain)
    assert stop.notice is not None


@pytest.mark.parametrize(("terminal", "is_live"), [("xterm-256color", True), ("dumb", False)])
def test_a_terminal_sees_the_display_and_is_left_clean(
    tmp_path: Path, terminal: str, is_live: bool
) -> None:
    path = tiny.write(tmp_path / "tiny.py", tiny.SLOW)
    child, screen = pty.fork()
    if child == 0:
        os.environ.update(TERM=terminal, OMP_NUM_THREADS="1", COLUMNS="90")
        arguments = ["-m", "midstep", "train", str(path), "--out", str(tmp_path / "run")]
        os.execv(sys.executable, [sys.executable, *arguments])
    text = b""
    while True:
        try:
            text += os.read(screen, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
    os.close(screen)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (b"\x1b[?25l" in text) is is_live  # the cursor is hidden
    assert text.count(b"\x1b[?25l") == text.count(b"\x1b[?25h")  # and comes back
    assert (b"first update" in text) is is_live
    summary = text.decode().partition("updates  ")[2]
    assert "20 applied" in summary
    assert " left" not in summary


@pytest.mark.parametrize("length", [2, 24, 25, 300, 1001])
def test_the_curve_of_the_loss_is_the_whole_run_in_few_characters(length: int) -> None:
    line = Sparkline(24)
    for step in range(length):
        line.add(10 - step)
        line.add(math.nan if step % 2 else None)
    text = line.text()
    assert 2 <= len(text) <= 24
    assert [*text] == sorted(text, reverse=True)  # it falls, as the values do
    assert (text[0], text[-1]) == ("\u2588", "\u2581")


def test_the_display_shows_the_course_of_the_loss() -> None:
    live = Live("run", 1000, 0, Stop(), console())
    for step in range(1, 9):
        live.on_update(record(step, loss_mean=9.0 - step))
    assert "\u2588\u2587\u2586\u2585\u2584\u2583\u2582\u2581" in shown(live, 200)[1]
