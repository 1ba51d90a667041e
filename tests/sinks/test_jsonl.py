"""A log is whole lines whatever happens, and never worth a run."""

import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_loop import classifier, loss_sum, pairs
from test_records import record_of

import midstep as ms


def lines_of(path: Path) -> list[ms.UpdateRecord]:
    text = path.read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [ms.UpdateRecord.from_json(line) for line in text.splitlines()]


def test_every_record_is_a_line_as_soon_as_it_is_made(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "new" / "updates.jsonl"
    model = classifier()
    with ms.JsonLines(path) as sink:
        updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), sinks=[sink])
        for index in range(3):
            record = updater.update(pairs(3), loss_sum, count=ms.targets())
            assert lines_of(path)[-1] == record
            assert len(lines_of(path)) == index + 1


@given(cut=st.integers(0, 2_000), torn=st.booleans())
def test_a_line_that_a_crash_cut_short_is_removed_and_the_others_stay(
    tmp_path_factory: pytest.TempPathFactory, cut: int, torn: bool
) -> None:
    path = tmp_path_factory.mktemp("log") / "updates.jsonl"
    records = [record_of(update=n) for n in range(1, 4)]
    whole = "".join(record.to_json() + "\n" for record in records).encode()
    content = whole[: min(cut, len(whole))] if torn else whole
    path.write_bytes(content)
    with ms.JsonLines(path) as sink:
        sink(record_of(update=9))
    kept = content.count(b"\n")
    assert lines_of(path) == [*records[:kept], record_of(update=9)]


def test_opening_again_goes_on_after_the_lines_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "updates.jsonl"
    for n in (1, 2):
        with ms.JsonLines(path) as sink:
            sink(record_of(update=n))
    assert [record.update for record in lines_of(path)] == [1, 2]


@pytest.mark.parametrize(("to", "kept"), [(0, []), (2, [1, 2]), (3, [1, 2, 3]), (9, [1, 2, 3])])
def test_rewinding_drops_what_a_resumed_run_will_make_again(
    tmp_path: Path, to: int, kept: list[int]
) -> None:
    path = tmp_path / "updates.jsonl"
    with ms.JsonLines(path) as sink:
        for n in (1, 2, 3):
            sink(record_of(update=n))
        sink.rewind(to)
        assert [record.update for record in lines_of(path)] == kept
        sink(record_of(update=10))
    assert [record.update for record in lines_of(path)] == [*kept, 10]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["updates.jsonl"]


# Neither needs torch, whose import would take longer than the test.
RECORD = f"""
import dataclasses
from midstep.records import UpdateRecord
from midstep.sinks import JsonLines
RECORD = UpdateRecord.from_json({record_of(update=1).to_json()!r})
def record_of(**changes):
    return dataclasses.replace(RECORD, **changes)
"""
WRITER = (
    RECORD
    + """
import sys
sink = JsonLines(sys.argv[1])
print("ready", flush=True)
n = 0
while True:
    n += 1
    sink(record_of(update=n, extra={"padding": "x" * (n % 997)}))
"""
)


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_after_a_kill_every_line_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "updates.jsonl"
    for pause in (0.0, 0.01, 0.05):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        text = path.read_bytes()
        assert text == b"" or text.endswith(b"\n")  # one system call a line
        numbers = [record.update for record in lines_of(path)]
        assert numbers == list(range(1, len(numbers) + 1))
        path.unlink()


class Failing:
    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.num_calls = 0

    def __call__(self, _: ms.UpdateRecord) -> None:
        self.num_calls += 1
        raise self.error

    def __repr__(self) -> str:
        return "Failing()"


def test_a_sink_that_fails_warns_once_and_stops_neither_the_run_nor_the_others() -> None:
    model = classifier()
    failing, seen = Failing(OSError("disk full")), []
    updater = ms.Updater(
        model, torch.optim.SGD(model.parameters(), lr=0.1), sinks=[failing, seen.append]
    )
    with pytest.warns(
        RuntimeWarning, match=r"`Failing\(\)` failed .*disk full.* update 1"
    ) as found:
        updater.update(pairs(3), loss_sum, count=ms.targets())
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            updater.update(pairs(3), loss_sum, count=ms.targets())
    assert failing.num_calls == 4
    assert [record.step for record in seen] == [1, 2, 3, 4]


def test_an_interrupt_inside_a_sink_is_the_callers() -> None:
    model = classifier()
    updater = ms.Updater(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        sinks=[Failing(KeyboardInterrupt())],
    )
    with pytest.raises(KeyboardInterrupt):
        updater.update(pairs(3), loss_sum, count=ms.targets())
    assert updater.clock.step == 1  # the update itself was done
    assert updater.state_dict()["clock"]["step"] == 1


FULL_DISK = (
    RECORD
    + """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sink = JsonLines(sys.argv[1])
length = len(record_of(update=1).to_json()) + 1
resource.setrlimit(resource.RLIMIT_FSIZE, (2 * length + length // 2, resource.RLIM_INFINITY))
errors = 0
for n in range(1, 6):
    try:
        sink(record_of(update=n))
    except OSError:
        errors += 1
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
sink(record_of(update=6))
print(errors)
"""
)


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs file size limits")
def test_a_line_that_does_not_fit_on_the_disk_is_taken_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "updates.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "3"
    assert [record.update for record in lines_of(path)] == [1, 2, 6]


def test_any_callable_is_a_sink() -> None:
    model = classifier()
    seen: list[Any] = []
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), sinks=[seen.append])
    record = updater.update(pairs(3), loss_sum, count=ms.targets())
    assert seen == [record]
