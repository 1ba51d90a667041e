"""`midstep train` as its user meets it: what it prints, writes, refuses and survives."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import midstep as ms
from midstep.cli import run as run_command

RECIPE = """
import torch
import midstep as ms

def recipe(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3))
    x, y = torch.randn(48, 4), torch.randint(0, 3, (48,))
    y[::7] = -100
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(
        data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(seed)
    )
    return ms.Recipe(
        model=model,
        train=loader,
        held_out=[(x[:8], y[:8])],
        loss=lambda model, batch: ms.cross_entropy(model(batch[0]), batch[1]),
        count=ms.targets(),
        optimizer=lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr),
        lr=0.01,
        size=2,
        steps=20,
        clip=ms.ByGlobalNorm(0.5),
        schedule=lambda steps: ms.schedules.cosine(total=steps, warmup=2),
        baselines={"guessing": 1.0986},
    )
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.py"
    path.write_text(RECIPE)
    return path


def run(*arguments: object) -> int:
    return run_command([str(argument) for argument in arguments])


def write(path: Path, *changes: tuple[str, str]) -> Path:
    text = RECIPE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(textwrap.dedent(text))
    return path


def lines_without_seconds(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "updates.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)["model"]


def test_a_run_prints_its_summary_and_leaves_its_files(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", recipe, "--out", tmp_path / "run") == 0
    out = capsys.readouterr().out
    records = [
        ms.UpdateRecord.from_json(line)
        for line in (tmp_path / "run" / "updates.jsonl").read_text().splitlines()
    ]
    assert len(records) == 20
    assert "20 applied, 0 skipped, from 40 microbatches" in out
    norms = [record.grad_norm for record in records]
    assert f"mean {sum(norms) / 20:.4g}, largest {max(norms):.4g}" in out
    assert f"{sum(record.clipped for record in records) / 20:.1%} of applied updates" in out
    assert f"{sum(record.denominators['loss'] for record in records):,}" in out
    assert "baseline of guessing, 1.0986" in out
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {
        "run.json",
        "updates.jsonl",
        "held_out.jsonl",
        "checkpoint.pt",
    }


def test_a_stopped_run_goes_on_bit_for_bit(recipe: Path, tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert run("train", recipe, "--precision", "fp16", "--out", straight) == 0
    process = _start(recipe, broken, "--precision", "fp16", "--save-every", "3")
    _wait_for_updates(broken, 7)
    process.kill()
    process.communicate()
    assert run("train", recipe, "--resume", broken) == 0
    assert lines_without_seconds(straight) == lines_without_seconds(broken)
    before, after = weights(straight), weights(broken)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("seed", range(3))
def test_a_run_killed_at_any_moment_goes_on_to_the_same_end(
    recipe: Path, tmp_path: Path, seed: int
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert run("train", recipe, "--out", straight) == 0
    process = _start(recipe, broken, "--save-every", "1")
    _wait_for_updates(broken, 1)
    time.sleep(random.Random(seed).uniform(0.0, 0.2))
    process.kill()
    process.communicate()
    assert run("train", recipe, "--resume", broken) == 0
    assert lines_without_seconds(straight) == lines_without_seconds(broken)


def test_control_c_saves_and_says_how_to_go_on(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = _start(recipe, folder)
    _wait_for_updates(folder, 3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert f"--resume {folder}" in err
    done = len(lines_without_seconds(folder))
    assert 3 <= done < 20
    assert run("train", recipe, "--resume", folder) == 0
    assert len(lines_without_seconds(folder)) == 20


def test_options_override_the_recipe_and_are_recorded(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code = run(
        "train",
        recipe,
        *("--out", folder, "--steps", 4, "--lr", 0.5, "--size", 3, "--clip", "none"),
        *("--schedule", "constant", "--seed", 7, "--precision", "bf16"),
    )
    assert code == 0
    records = lines_without_seconds(folder)
    assert [record["lr"] for record in records] == [[0.5]] * 4
    assert {record["num_microbatches"] for record in records} == {3}
    assert not any(record["clipped"] for record in records)
    about = json.loads((folder / "run.json").read_text())
    assert about["options"]["seed"] == 7
    assert about["settings"]["precision"] == "BF16()"


def test_a_run_is_never_overwritten(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert run("train", recipe, "--out", folder, "--steps", 4) == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert run("train", recipe, "--out", folder) == 2
    assert "holds a run already" in one_line(capsys)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_resumed_run_refuses_another_option(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert run("train", recipe, "--out", folder, "--steps", 4) == 0
    assert run("train", recipe, "--resume", folder, "--lr", 0.1) == 2
    assert "was begun with `lr` 0.01" in one_line(capsys)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    err = capsys.readouterr().err.strip()
    assert err.startswith("midstep")
    assert "\n" not in err
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "nothing"], "neither built in"),
        (["train", "nothing.py"], "no such file"),
        (["train", "language", "--wrong"], "No such option: --wrong"),
        (["train", "language", "--size", "-1"], "must be at least 1"),
        (["train", "language", "--steps", "0"], "must be at least 1"),
        (["train", "language", "--size", "x"], "--size"),
        (["train", "language", "--lr", "nan"], "must be greater than 0"),
        (["train", "language", "--clip", "0"], "must be greater than 0, or `none`"),
        (["train", "language", "--clip", "much"], "neither a number nor `none`"),
        (["train", "language", "--precision", "int8"], "--precision"),
        (["train", "language", "--size", "2", "--rows", "2"], "exclude each other"),
        (["train", "language", "--warmup", "3"], "without `--schedule`"),
        (["train", "language", "--seed", "-1"], "must be from 0"),
        (["train", "language", "--resume", "nowhere"], "holds no run"),
        (["train"], "which recipe?"),
        (["fly"], "No such command"),
    ],
)
def test_a_bad_argument_gets_one_clear_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert words in one_line(capsys)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("ms.cross_entropy(model(batch[0]), batch[1])", "model(batch[0])", "a gradient is of one"),
        ("ms.cross_entropy(model(batch[0]), batch[1])", "torch.tensor(1.0)", "has no graph"),
        ("count=ms.targets()", "count=ms.rows()", "the window's count found"),
        ("import midstep as ms", "import midstep as ms (", "SyntaxError"),
        ("torch.manual_seed(seed)", "raise RuntimeError('no data')", "no data"),
        ("def recipe(seed)", "def another(seed)", "defines no function"),
        ("return ms.Recipe(", "return dict(", "returned a `dict`"),
        ("size=2,", "size=0,", "at least 1"),
        (
            "torch.optim.AdamW(model.parameters(), lr=lr)",
            "torch.optim.LBFGS(model.parameters())",
            "closure",
        ),
    ],
)
def test_a_bad_recipe_gets_one_clear_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, words: str
) -> None:
    path = write(tmp_path / "bad.py", (old, new))
    assert run("train", path, "--out", tmp_path / "run") == 2
    assert words in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_a_failure_in_mid_run_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        tmp_path / "bad.py",
        ("return ms.Recipe(", "calls = []\n    return ms.Recipe("),
        (
            "def recipe(seed):",
            (
                "def loss_until(n, model, batch, calls):\n"
                "    calls.append(1)\n"
                "    still = 1 // (len(calls) < n)\n"
                "    return ms.cross_entropy(model(batch[0]) * still, batch[1])\n\n"
                "def recipe(seed):"
            ),
        ),
        (
            "ms.cross_entropy(model(batch[0]), batch[1])",
            "loss_until(15, model, batch, calls)",
        ),
    )
    folder = tmp_path / "run"
    assert run("train", path, "--out", folder, "--save-every", 2) == 2
    err = capsys.readouterr().err
    assert "bad.py:" in err
    assert "--resume" in err
    assert "Traceback" not in err
    assert len(lines_without_seconds(folder)) >= 6
    assert weights(folder)


def test_a_non_finite_gradient_names_its_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "bad.py", ("y[::7] = -100", "y[::7] = -100; x[5] = float('nan')"))
    assert run("train", path, "--out", tmp_path / "a") == 2
    assert "entries of the gradient are inf or nan" in capsys.readouterr().err
    assert run("train", path, "--out", tmp_path / "b", "--skip-nonfinite", 3) == 0
    assert "nonfinite" in capsys.readouterr().out


def test_an_unreadable_checkpoint_changes_nothing(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert run("train", recipe, "--out", folder, "--steps", 4) == 0
    (folder / "checkpoint.pt").write_bytes(b"torn")
    before = (folder / "updates.jsonl").read_bytes()
    assert run("train", recipe, "--resume", folder) == 2
    assert "cannot be read as a checkpoint" in capsys.readouterr().err
    assert (folder / "updates.jsonl").read_bytes() == before


def test_a_folder_that_cannot_be_made_gets_one_line(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run("train", recipe, "--out", tmp_path / "file" / "run") == 2
    assert "file" in one_line(capsys)


def test_a_full_disk_leaves_the_last_checkpoint_whole(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # The records outgrow the limit before the checkpoint, which is written again and again, does.
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, 80_000));"
        "from midstep.cli import run; sys.exit(run(sys.argv[1:]))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, "train", recipe, "--steps", "900", "--save-every", "20",
         "--out", folder],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert process.returncode == 2, process.stderr
    assert "Traceback" not in process.stderr
    assert weights(folder)
    assert all(json.loads(line) for line in (folder / "updates.jsonl").read_text().splitlines())
    process = subprocess.run(
        [sys.executable, "-m", "midstep", "train", recipe, "--resume", folder],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr


def test_help_needs_no_torch_and_names_every_option() -> None:
    code = (
        "import sys\nfrom midstep.cli import run\nassert run(['train', '--help']) == 0\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    for option in ("--size", "--rows", "--precision", "--clip", "--schedule", "--resume", "--seed"):
        assert option in process.stdout


def _start(recipe: Path, folder: Path, *options: str) -> "subprocess.Popen[str]":
    # Slow enough to be met in the middle of it.
    slow = recipe.with_name("tiny.py")
    text = RECIPE.replace(
        "loss=lambda model, batch: ",
        "loss=lambda model, batch: __import__('time').sleep(0.02) or ",
    )
    slow.write_text(text)
    return subprocess.Popen(
        [sys.executable, "-m", "midstep", "train", slow, "--out", folder, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _wait_for_updates(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        path = folder / "updates.jsonl"
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.01)
    raise AssertionError("no updates came")
