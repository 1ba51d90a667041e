"""Records arrive in the tools that others look at, under the names of those tools.

Each test logs with the tool itself, in a process of its own: they keep state in globals, threads
or environment variables. What arrived is read back by the tool.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_records import record_of

from midstep.sinks import MLflow, TensorBoard, Trackio, WandB
from midstep.sinks.missing import imported

LOGGED = f"""
import dataclasses, json, sys
from midstep.records import UpdateRecord

record = UpdateRecord.from_json({record_of(extra={"clip_max_norm": 0.5}).to_json()!r})
records = [
    dataclasses.replace(record, update=n, step=n, loss_mean=1.0 / n, lr=[0.1 * n],
        extra={{"clip_max_norm": 0.5, "grad_norms": {{"head.weight": 2.0 * n}}}})
    for n in (1, 2, 3)
]

def log(sink):
    for record in records:
        sink(record)

def tell(found):
    wanted = {{
        "train/loss": [r.loss_mean for r in records],
        "train/grad_norm": [r.grad_norm for r in records],
        "train/lr": [r.lr[0] for r in records],
        "train/clip_max_norm": [0.5] * 3,
        "grad_norm/head.weight": [r.extra["grad_norms"]["head.weight"] for r in records],
    }}
    print("told " + json.dumps({{"wanted": wanted, "found": {{n: found(n) for n in wanted}}}}))
"""

TENSORBOARD = """
from midstep.sinks import TensorBoard
with TensorBoard(sys.argv[1]) as sink:
    log(sink)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
tell(lambda name: [[e.step, e.value] for e in events.Scalars(name)])
"""

WANDB = """
import pathlib, wandb
from midstep.sinks import WandB
run = wandb.init(project="midstep", mode="offline", dir=sys.argv[1])
log(WandB())
run.finish()
wandb.teardown()  # waits for the process that writes

def messages(data):  # the log of LevelDB: blocks of 32 KiB, 7 bytes before each fragment
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # full, or last
            yield whole
            whole = b""

from wandb.proto import wandb_internal_pb2
(log,) = pathlib.Path(sys.argv[1]).glob("wandb/offline-run-*/run-*.wandb")
rows = []
for message in messages(log.read_bytes()):
    part = wandb_internal_pb2.Record()
    part.ParseFromString(message)
    if part.WhichOneof("record_type") == "history":
        items = part.history.item
        rows.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items})
tell(lambda name: [[row["update"], row[name]] for row in rows if name in row])
"""

MLFLOW = """
import mlflow
from midstep.sinks import MLflow
mlflow.set_tracking_uri("file://" + sys.argv[1] + "/mlruns")
with mlflow.start_run() as run:
    log(MLflow())
client = mlflow.MlflowClient()
history = lambda name: client.get_metric_history(run.info.run_id, name)
tell(lambda name: [[m.step, m.value] for m in history(name)])
"""

TRACKIO = """
import trackio
from midstep.sinks import Trackio
log(Trackio(trackio.init(project="midstep", name="run", embed=False)))
trackio.finish()
from trackio.sqlite_storage import SQLiteStorage
rows = SQLiteStorage.get_logs("midstep", "run")
tell(lambda name: [[row["step"], row[name]] for row in rows if name in row])
"""


def told(code: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", LOGGED + code, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={
            **os.environ,
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "TRACKIO_DIR": str(folder),
            "WANDB_SILENT": "true",
            "WANDB_ERROR_REPORTING": "false",
        },
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(lines[0].removeprefix("told "))
    return answer


@pytest.mark.parametrize(
    ("tool", "code"),
    [
        ("tensorboard", TENSORBOARD),
        ("wandb", WANDB),
        ("mlflow", MLFLOW),
        ("trackio", TRACKIO),
    ],
)
def test_every_record_arrives_at_its_update_under_the_usual_names(
    tool: str, code: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed: pip install 'midstep[{tool}]'")
    answer = told(code, tmp_path)
    for name, values in answer["wanted"].items():
        found = answer["found"][name]
        assert [step for step, _ in found] == [1, 2, 3], name
        assert [value for _, value in found] == pytest.approx(values, rel=1e-6), name


@pytest.mark.parametrize("sink", [TensorBoard, WandB, MLflow, Trackio])
def test_a_tool_that_is_missing_is_named_with_the_way_to_install_it(
    sink: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = sink.__name__.lower()
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ImportError, match=rf"`{sink.__name__}\(\)`.*midstep\[{extra}\]"):
        sink("somewhere")


def test_the_import_of_a_tool_says_what_broke() -> None:
    with pytest.raises(ImportError, match=r"`x`, which cannot be imported.*'x'.*midstep\[y\]"):
        imported("x", "Sink", "y")


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="needs trackio")
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_run_is_refused() -> None:
    with pytest.raises(TypeError, match="is no run"):
        Trackio("midstep")


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
@pytest.mark.filterwarnings("ignore")
def test_without_an_active_run_there_is_nothing_to_log_to() -> None:
    with pytest.raises(ValueError, match="no run is active"):
        WandB()


class Run:
    """A run of some tool that keeps what it is told."""

    def __init__(self) -> None:
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    def log(self, scalars: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step, scalars))


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="needs trackio")
@pytest.mark.filterwarnings("ignore")
def test_a_skipped_update_is_a_point_of_its_own() -> None:
    run = Run()
    sink = Trackio(run)
    sink(record_of(update=7, step=6))
    sink(record_of(update=8, step=6, verdict="skipped_nonfinite", grad_norm=float("nan")))
    assert [step for step, _ in run.logged] == [7, 8]
    assert [scalars["train/step"] for _, scalars in run.logged] == [6.0, 6.0]
