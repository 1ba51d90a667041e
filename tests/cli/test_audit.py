"""`midstep audit`: the script runs as Python would run it, and its loop is reported on."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import watched

from midstep.cli import audit_options, run
from midstep.cli.application import invoke
from midstep.cli.audit import Asked, asked_by

FAULTY = watched.loop(
    """
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""
)
FAULTY_LINE = FAULTY.splitlines().index("    optimizer.step()") + 1
SOUND = FAULTY.replace("    loss.backward()", "    optimizer.zero_grad()\n    loss.backward()")


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Give back what a script takes over, and stand in an empty folder."""
    main, argv, path = sys.modules["__main__"], list(sys.argv), list(sys.path)
    monkeypatch.chdir(tmp_path)
    # A process group of an earlier test would put the rank in front of each line.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    yield
    sys.modules["__main__"], sys.argv[:], sys.path[:] = main, argv, path


def write(text: str, name: str = "train.py") -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")
    return name


def audit(*arguments: str) -> tuple[int, list[tuple[str, str, int]]]:
    """The exit code, and code, path and line of every finding."""
    out = Path("found.json").absolute()
    code = run(["audit", "--format", "json", "--out", "found.json", *arguments])
    found = json.loads(out.read_text(encoding="utf-8"))["findings"]
    return code, [(f["code"], f["path"], f["line"]) for f in found]


def test_a_defect_is_reported_with_its_line_and_exit_code_1() -> None:
    assert audit(write(FAULTY)) == (1, [("MS109", "train.py", FAULTY_LINE)])


def test_a_sound_loop_ends_with_exit_code_0() -> None:
    assert audit(write(SOUND)) == (0, [])


def test_the_text_says_evidence_effect_and_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", write(FAULTY)]) == 1
    said = capsys.readouterr()
    assert f"train.py:{FAULTY_LINE}:1: error MS109 zero-grad-missing: `9` of `10` steps" in said.out
    assert "    effect: " in said.out
    assert "    fix: " in said.out
    assert said.err == (
        "midstep audit: 1 finding in 10 updates. `midstep explain CODE` tells more.\n"
    )


def test_a_script_without_a_step_is_said_to_be_unaudited(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["audit", write("print('no loop')")]) == 0
    assert "no step of an optimizer was seen" in capsys.readouterr().err


def test_the_script_gets_its_own_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    name = write("import sys\nprint(sys.argv, sys.path[0] == sys.argv[0].rpartition('/')[0])")
    assert run(["audit", str(Path(name).absolute()), "--lr", "1", "--advice", "-m"]) == 0
    path = str(Path(name).absolute())
    assert capsys.readouterr().out == f"{[path, '--lr', '1', '--advice', '-m']} True\n"


def test_the_script_is_main_and_finds_its_neighbours(capsys: pytest.CaptureFixture[str]) -> None:
    write("WORD = 'neighbour'", "folder/beside.py")
    name = write(
        "import __main__, pickle, beside\n"
        "class Thing:\n    pass\n"
        "print(__name__, beside.WORD, __main__.Thing is Thing, __file__)\n"
        "pickle.loads(pickle.dumps(Thing()))\n",
        "folder/train.py",
    )
    assert run(["audit", name]) == 0
    whole = Path(name).absolute()
    assert capsys.readouterr().out == f"__main__ neighbour True {whole}\n"


def test_a_module_runs_as_python_would_run_it(capsys: pytest.CaptureFixture[str]) -> None:
    write("from .inner import WORD\nimport sys\nprint(__name__, WORD, sys.argv[1:])", "pack/go.py")
    write("WORD = 'relative'", "pack/inner.py")
    write("print('package', __package__)", "pack/__main__.py")
    write("", "pack/__init__.py")
    assert run(["audit", "-m", "pack.go", "-x"]) == 0
    assert run(["audit", "-m", "pack"]) == 0
    assert capsys.readouterr().out == "__main__ relative ['-x']\npackage pack\n"


@pytest.mark.parametrize(("end", "code"), [("3", 3), ("None", 1), ("0", 1), ("'stop'", 1)])
def test_the_exit_code_of_the_script_comes_first(end: str, code: int) -> None:
    found = audit(write(f"{FAULTY}\nimport sys\nsys.exit({end})\n"))
    assert found == (code, [("MS109", "train.py", FAULTY_LINE)])


def test_an_exception_is_shown_as_usual_and_findings_are_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, found = audit(write(f"{FAULTY}\nraise LookupError('of the script')\n"))
    assert (code, found) == (1, [("MS109", "train.py", FAULTY_LINE)])
    shown = capsys.readouterr().err
    whole = Path("train.py").absolute()
    assert shown.startswith(f'Traceback (most recent call last):\n  File "{whole}", line ')
    assert "LookupError: of the script\n" in shown
    assert "launching.py" not in shown


def test_what_cannot_be_run_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write("x = (", "broken.py")
    for arguments, words in (
        (["no_such.py"], "`no_such.py`: No such file or directory."),
        (["-m", "no_such_module"], "no module `no_such_module`"),
        (["broken.py"], "`broken.py:1`: '(' was never closed."),
        (["--select", "MS999", "broken.py"], "`MS999` names no defect"),
    ):
        assert run(["audit", *arguments]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("midstep: ")
        assert words in shown
        assert shown.count("\n") == 1


def test_advice_is_given_when_it_is_asked_for() -> None:
    name = write(SOUND)
    assert [code for code, _, _ in audit("--advice", name)[1]] == ["MS802"]
    assert audit("--advice", "--ignore", "MS8", name) == (0, [])


def test_a_comment_in_the_script_silences_a_finding() -> None:
    text = FAULTY.replace(".step()", ".step()  # midstep: ignore[MS109] on purpose")
    assert audit(write(text)) == (0, [])


def test_a_few_windows_are_watched_and_the_script_runs_to_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = f"{FAULTY}\nprint('the end')\n"
    assert run(["audit", "--windows", "4", write(text)]) == 1
    said = capsys.readouterr()
    assert "the end\n" in said.out
    assert "in 4 updates" in said.err


def start(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_standard_output_holds_nothing_but_the_json() -> None:
    name = write(f"{FAULTY}\nimport os\nprint('hello')\nos.system('echo from a child')\n")
    process = start("-m", "midstep", "audit", "--format", "json", name)
    assert [f["code"] for f in json.loads(process.stdout)["findings"]] == ["MS109"]
    assert {"hello", "from a child"} <= set(process.stderr.splitlines())
    assert process.returncode == 1


RANKED = """
import os
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(8, 4)
    y = torch.randint(3, (8,))
    y[: 6 * rank] = -100
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)  # unequal
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_under_torchrun_one_rank_reports_for_all() -> None:
    name = write(RANKED)
    process = start(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "midstep", "audit", name),
    )
    line = next(n for n, text in enumerate(RANKED.splitlines(), 1) if "# unequal" in text)
    reported = [text for text in process.stdout.splitlines() if " MS" in text]
    (finding,) = reported
    assert finding.startswith(f"train.py:{line}:1: warning MS501 rank-local-denominator: ")
    assert finding.endswith("The ranks counted `8, 2` targets, and each weighed `1 / 2`.")
    assert "1 finding in 6 updates of 2 processes" in process.stderr


SPAWNED = """
import torch.multiprocessing as mp

def train(rank):
    import torch
    import torch.nn.functional as F
    from torch import nn
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        F.cross_entropy(model(torch.randn(2, 4)), torch.randint(3, (2,))).backward()
        optimizer.step()  # stale

if __name__ == "__main__":
    mp.spawn(train, nprocs=1)
    process = mp.get_context("fork").Process(target=train, args=(0,))
    process.start()
    process.join()
"""


def test_processes_that_the_script_starts_are_watched_too() -> None:
    process = start("-m", "midstep", "audit", write(SPAWNED))
    line = next(n for n, text in enumerate(SPAWNED.splitlines(), 1) if "# stale" in text)
    reported = [text for text in process.stdout.splitlines() if " MS" in text]
    assert [text.partition(" MS109")[0] for text in reported] == [f"train.py:{line}:1: error"]
    assert "in 6 updates of 3 processes" in process.stderr


def test_a_script_is_compiled_without_the_features_of_this_library() -> None:
    # `from __future__ import annotations` of the launcher would turn them into texts.
    script = "def scale(x: int): ...\nassert scale.__annotations__ == {'x': int}\n"
    assert run(["audit", write(script)]) == 0


def test_a_script_that_goes_to_another_folder_is_told_from_the_first_one() -> None:
    away = (
        f"import os\nos.mkdir('away')\nos.chdir('away')\nassert os.path.exists(__file__)\n{FAULTY}"
    )
    code, found = audit(write(away))
    assert code == 1
    assert [(path, line) for _, path, line in found] == [("train.py", FAULTY_LINE + 4)]


def test_one_of_several_training_threads_is_watched() -> None:
    threads = """
import threading
import torch

turn = threading.Barrier(2)


def train():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        loss = model(torch.ones(2, 4)).square().mean()
        turn.wait()
        optimizer.zero_grad()
        turn.wait()
        loss.backward()
        turn.wait()
        optimizer.step()


workers = [threading.Thread(target=train) for _ in range(2)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
"""
    assert audit(write(threads)) == (0, [])


LOADED = """
import sys

print("loaded:", *sys.modules)
"""


def test_nothing_of_the_option_parser_nor_of_a_report_is_loaded_beside_the_script() -> None:
    for text, code in ((SOUND, 0), (FAULTY, 1)):
        name = write(text + LOADED)
        line = f"from midstep.cli import run\ncode = run(['audit', {name!r}])"
        process = start("-c", f"{line}{LOADED}sys.exit(code)")
        assert process.returncode == code, process.stderr
        beside, after = (
            set(said.split()) for said in process.stdout.splitlines() if said.startswith("loaded:")
        )
        assert {"torch", "midstep.auditing.recorder.watching"} <= beside
        for late in ("findings", "defects", "auditing.checks", "auditing.source", "updater"):
            assert f"midstep.{late}" not in beside
        assert "midstep.auditing.checks" in after
        assert not {"typer", "rich", "pydantic", "midstep.cli.application"} & after


def test_the_end_of_the_process_finds_and_finishes_what_the_script_made() -> None:
    text = """
import atexit


class Thing:
    def __init__(self):
        self.me = self
        self.file = open("late.txt", "w")
        self.file.write("written")

    def __del__(self):
        print("finished")


thing = Thing()
atexit.register(lambda: print("at exit", thing.me is thing))
"""
    process = start("-m", "midstep", "audit", write(SOUND + text))
    assert process.stdout.split("\n")[-3:] == ["at exit True", "finished", ""]
    assert Path("late.txt").read_text(encoding="utf-8") == "written"
    assert process.stderr == "midstep audit: nothing found in 10 updates.\n"


def test_a_process_that_goes_on_collects_its_garbage_as_before() -> None:
    frozen = gc.get_freeze_count()
    assert run(["audit", write(SOUND)]) == 0
    assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen


@pytest.mark.parametrize(
    "line",
    [
        "train.py",
        "train.py --advice -m -- x --windows 3",
        "-m pack.go --lr 1",
        "--module --advice train.py",
        "--windows 3 --windows=12 train.py",
        "--format json --out found.json train.py a b",
        "--format=sarif --format text train.py",
        "--select MS1 --select=MS2,MS3 --ignore clip-after-step train.py",
        "--out=a=b train.py -",
    ],
)
def test_a_line_in_order_is_read_as_the_option_parser_reads_it(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[Asked] = []

    def keep(asked: Asked) -> int:
        parsed.append(asked)
        return 0

    monkeypatch.setattr(audit_options, "audit_directly", keep)
    assert invoke(["audit", *line.split()]) == 0
    asked = asked_by(line.split())
    assert asked is not None
    assert {**vars(asked), "style": asked.style or "text"} == vars(parsed[0])


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--help",
        "--advice",
        "--help train.py",
        "--no-such train.py",
        "--windows 0 train.py",
        "--windows -1 train.py",
        "--windows two train.py",
        "--format poem train.py",
        "--advice=yes train.py",
        "--select",
        "--select --advice train.py",
        "--out= train.py",
        "-- train.py",
        "-mx train.py",
        "-",
    ],
)
def test_any_other_line_is_left_to_the_option_parser(line: str) -> None:
    assert asked_by(line.split()) is None
