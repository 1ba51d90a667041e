"""A log is read whoever wrote it: midstep, CSV, JSON lines, TensorBoard, Lightning and more."""

import json
import math
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_records import record_of

from midstep.errors import MidstepError
from midstep.report import judge, read
from midstep.report.verdict.facts import facts_of


def write(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(record.to_json() + "\n" for record in records))
    return path


# -- records of midstep ---------------------------------------------------------------------------


def test_every_number_of_every_record_is_found_again(tmp_path: Path) -> None:
    records = [
        record_of(
            update=n, step=n, grad_norm=n / 3, lr=[n * 1e-3, n * 1e-4], extra={"new": n * 2.5}
        )
        for n in range(1, 6)
    ]
    run = read(write(tmp_path / "updates.jsonl", *records))
    assert run.column("grad_norm").tolist() == [record.grad_norm for record in records]
    assert run.column("lr").tolist() == [record.lr[0] for record in records]
    assert run.column("lr.1").tolist() == [record.lr[1] for record in records]
    assert run.column("targets").tolist() == [512.0] * 5
    assert run.column("new").tolist() == [2.5, 5.0, 7.5, 10.0, 12.5]


def test_what_a_record_lacks_is_nan_and_what_is_infinite_stays_so(tmp_path: Path) -> None:
    skipped = record_of(
        update=2, verdict="skipped_nonfinite", grad_norm=math.inf, clip_coefficient=None
    )
    run = read(write(tmp_path / "updates.jsonl", record_of(update=1), skipped))
    assert run.column("grad_norm").tolist() == [2.0, math.inf]
    assert np.isnan(run.column("clip_coefficient")[1])
    assert run.applied.tolist() == [True, False]
    assert run.skipped == {"skipped_nonfinite": 1}


def test_what_was_observed_of_tensors_now_and_then_keeps_its_updates(tmp_path: Path) -> None:
    records = [
        record_of(update=n, extra={"grad_norms": {"a": n, "b": 2 * n}} if n % 2 == 0 else {})
        for n in range(1, 7)
    ]
    run = read(write(tmp_path / "updates.jsonl", *records))
    samples = run.by_name["grad_norms"]["b"]
    assert samples.updates.tolist() == [2, 4, 6]
    assert samples.values.tolist() == [4, 8, 12]


@given(cut=st.integers(1, 300))
def test_a_last_line_cut_anywhere_is_left_out(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "updates.jsonl"
    lines = [record_of(update=n).to_json() + "\n" for n in (1, 2, 3)]
    path.write_text("".join(lines[:2]) + lines[2][:cut])
    run = read(path)
    whole = 3 if cut >= len(lines[2]) - 1 else 2
    assert run.updates.tolist() == [1, 2, 3][:whole]


def test_a_torn_line_in_the_middle_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "updates.jsonl"
    line = record_of(update=1).to_json()
    path.write_text(f"{line}\n{line[:50]}\n{line}\n")
    with pytest.raises(MidstepError, match="line 2 is not JSON"):
        read(path)


def test_a_threshold_comes_from_the_record_the_clip_or_the_settings(tmp_path: Path) -> None:
    clipped = record_of(update=1, grad_norm=2.0, clip_coefficient=0.25, clipped=True)
    free = record_of(update=2, grad_norm=0.1, clip_coefficient=1.0, clipped=False)
    path = write(tmp_path / "a" / "updates.jsonl", clipped, free)
    assert read(path).threshold.tolist() == [0.5, 0.5]
    path = write(tmp_path / "b" / "updates.jsonl", free)
    settings = {"clip": "Chain(ByValue(max=1.0))"}
    about = {"format": "midstep run", "settings": settings}
    path.with_name("run.json").write_text(json.dumps(about))
    assert np.isnan(read(path).threshold).all()
    settings["clip"] = "ByGlobalNorm(max_norm=0.7, p=2.0)"
    path.with_name("run.json").write_text(json.dumps(about))
    assert read(path).threshold.tolist() == [0.7]
    dynamic = record_of(update=2, clipped=False, extra={"clip_max_norm": 3.0})
    assert read(write(tmp_path / "c" / "updates.jsonl", dynamic)).threshold.tolist() == [3.0]


def test_a_hundred_thousand_records_are_read_in_seconds(tmp_path: Path) -> None:
    line = record_of(update=7).to_json()
    path = tmp_path / "updates.jsonl"
    with path.open("w") as file:
        for n in range(1, 100_001):
            file.write(line.replace('"update":7', f'"update":{n}') + "\n")
    started = time.perf_counter()
    run = read(path)
    judge(run)
    seconds = time.perf_counter() - started
    assert len(run) == 100_000
    assert seconds < 20  # 2.5 s on a quiet core; a log read twice, or by the square, is not


# -- logs of others -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        "step,loss,grad_norm,lr",
        "global_step,train/loss,train/grad_norm,train/learning_rate",
        "iteration;Loss/train;total_norm;lr-AdamW",
        "Step\ttrain_loss_step\tgradient_norm\tlearning_rate",
    ],
)
def test_the_columns_of_a_csv_are_told_by_their_names(tmp_path: Path, head: str) -> None:
    mark = next(mark for mark in ",;\t" if mark in head)
    rows = [mark.join(map(str, (n, 3 - n, n / 4, 1e-3))) for n in (1, 2)]
    path = tmp_path / "log.csv"
    path.write_text("\n".join([head, *rows]))
    run = read(path)
    assert run.updates.tolist() == [1, 2]
    assert run.column("loss_mean").tolist() == [2, 1]
    assert run.column("grad_norm").tolist() == [0.25, 0.5]
    assert run.column("lr").tolist() == [1e-3, 1e-3]


def test_a_column_that_is_named_is_taken_and_one_that_is_not_there_is_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log.csv"
    path.write_text("step,loss,a,b\n1,2,0.5,7\n2,1,0.25,8\n")
    assert not read(path).has("grad_norm")
    assert read(path, columns={"grad_norm": "a"}).column("grad_norm").tolist() == [0.5, 0.25]
    with pytest.raises(MidstepError, match=r"no column `c`.*`a`, `b`"):
        read(path, columns={"grad_norm": "c"})
    with pytest.raises(MidstepError, match="a run has no `norm`"):
        read(path, columns={"norm": "a"})


def test_a_log_without_a_loss_or_a_norm_is_refused_with_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(MidstepError, match=r"no column looks like a loss.*a, b"):
        read(path)


def test_a_restarted_log_counts_each_step_once_and_the_later_value(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    steps = [(1, 5.0), (3, 9.0), (2, 4.5), (3, 3.0)]
    path.write_text("".join(json.dumps({"step": s, "loss": x}) + "\n" for s, x in steps))
    run = read(path)
    assert run.updates.tolist() == [1, 2, 3]
    assert run.column("loss_mean").tolist() == [5.0, 4.5, 3.0]


def test_nested_json_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "train": {"loss": 2.0, "grad_norm": "inf"}, "note": "x"}\n')
    run = read(path)
    assert run.column("loss_mean").tolist() == [2.0]
    assert run.column("grad_norm").tolist() == [math.inf]


def test_the_log_of_lightning_puts_a_step_into_several_rows(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(
        "epoch,step,train_loss_step,train_loss_epoch,val_loss,lr-SGD\n"
        "0,0,,,,0.1\n0,0,2.0,,,\n0,1,,,,0.1\n0,1,1.5,,,\n0,1,,,1.8,\n0,1,,1.75,,\n"
    )
    run = read(tmp_path)
    assert run.updates.tolist() == [0, 1]
    assert run.column("loss_mean").tolist() == [2.0, 1.5]
    assert run.column("lr").tolist() == [0.1, 0.1]
    assert run.held_out is not None
    assert run.held_out.values.tolist() == [1.8]


def test_the_state_of_a_transformers_trainer_is_read(tmp_path: Path) -> None:
    history = [
        {"epoch": 0.1, "grad_norm": 1.5, "learning_rate": 5e-5, "loss": 2.0, "step": 10},
        {"epoch": 0.1, "eval_loss": 1.9, "eval_runtime": 1.0, "step": 10},
        {"epoch": 0.2, "grad_norm": 1.25, "learning_rate": 4e-5, "loss": 1.8, "step": 20},
        {"epoch": 0.2, "step": 20, "train_loss": 1.9, "train_runtime": 9.0, "total_flos": 1.0},
    ]
    for step, rows in ((10, history[:2]), (20, history)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    run = read(tmp_path)
    assert run.updates.tolist() == [10, 20]
    assert run.column("loss_mean").tolist() == [2.0, 1.8]
    assert run.column("grad_norm").tolist() == [1.5, 1.25]
    assert run.held_out is not None
    assert run.held_out.values.tolist() == [1.9]


# -- TensorBoard, by its own encoding ----------------------------------------------------------


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def event(step: int, tag: str, value: float, *, is_tensor: bool = False) -> bytes:
    number = struct.pack("<f", value)
    # dtype is DT_FLOAT, 1; its shape is empty; the value stands in `float_val`, packed.
    tensor = field(8, b"\x08\x01" + field(2, b"") + field(5, number))
    content = tensor if is_tensor else varint(2 << 3 | 5) + number
    summary = field(1, field(1, tag.encode()) + content)
    message = b"\x09" + struct.pack("<d", 1e9) + b"\x10" + varint(step) + field(5, summary)
    return struct.pack("<QI", len(message), 0) + message + struct.pack("<I", 0)


@pytest.mark.parametrize("is_tensor", [False, True])
def test_scalars_of_event_files_are_decoded(tmp_path: Path, is_tensor: bool) -> None:
    version = b"\x09" + struct.pack("<d", 1e9) + field(3, b"brain.Event:2")
    data = struct.pack("<QI", len(version), 0) + version + struct.pack("<I", 0)
    for step in (1, 300):
        data += event(step, "train/loss", 2.5 / step, is_tensor=is_tensor)
        data += event(step, "train/grad_norm", 0.5, is_tensor=is_tensor)
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(data + event(301, "train/loss", 1.0)[:-3])  # torn
    run = read(tmp_path)
    assert run.updates.tolist() == [1, 300]
    assert run.column("loss_mean").tolist() == pytest.approx([2.5, 2.5 / 300])
    assert run.column("grad_norm").tolist() == [0.5, 0.5]


def test_what_tensorboard_itself_wrote_is_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(5):
            writer.add_scalar("Loss/train", 1 / (step + 1), step)
            writer.add_scalar("grad_norm", float(step), step)
        writer.add_histogram("weights", torch.randn(9), 4)
    run = read(tmp_path)
    assert run.updates.tolist() == [0, 1, 2, 3, 4]
    assert run.column("loss_mean").tolist() == pytest.approx([1 / n for n in range(1, 6)])


@pytest.mark.parametrize("name", ["events.out.tfevents.1.host", "trainer_state.json", "notes.txt"])
def test_a_file_that_is_none_of_these_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"no log at all, but text that is long enough")
    with pytest.raises(MidstepError, match="is not"):
        read(path)


def test_a_folder_without_a_log_and_a_path_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MidstepError, match="holds no log"):
        read(tmp_path)
    with pytest.raises(MidstepError, match="does not exist"):
        read(tmp_path / "nowhere")
    (tmp_path / "updates.jsonl").write_text("")
    with pytest.raises(MidstepError, match="no update yet"):
        read(tmp_path)


def test_what_an_update_was_over_and_its_decay_are_facts_of_a_run(tmp_path: Path) -> None:
    log = tmp_path / "updates.jsonl"
    rows = [
        {
            "update": n, "step": n, "verdict": "applied", "denominators": {"loss": count},
            "loss_means": {"loss": 1.0}, "loss_mean": 1.0, "lr": [0.1, 0.01],
            "decay_exponent": [0.01 * n, 0.0],
        }
        for n, count in enumerate([512, 384, 500, 128], start=1)
    ]  # fmt: skip
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read(log)
    assert run.column("decay_exponent").tolist() == [0.01, 0.02, 0.03, 0.04]
    facts = facts_of(run)
    assert facts["effective batch"] == "381 targets an update on average (128 to 512)"
    assert facts["decay exponent"].startswith("0.04, 0")
