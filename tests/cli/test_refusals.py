"""What cannot be done gets one clear line and exit code 2, and nothing that was there is lost."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "tiny.py")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("train", "which recipe?"),
        ("train nothing", "neither built in"),
        ("train nothing.py", "no such file"),
        ("train language --wrong", "No such option: --wrong"),
        ("train language more", "See `midstep train --help`."),
        ("train language --size", "requires an argument"),
        ("train language --size -1", "`--size -1`: must be at least 1"),
        ("train language --rows 0", "must be at least 1"),
        ("train language --targets -5", "must be at least 1"),
        ("train language --steps 0", "must be at least 1"),
        ("train language --save-every 0", "`--save-every 0`: must be at least 1"),
        ("train language --evaluate-every -2", "must be at least 1"),
        ("train language --skip-nonfinite 0", "must be at least 1"),
        ("train language --size x", "Invalid value for '--size'"),
        ("train language --size 1.5", "Invalid value for '--size'"),
        ("train language --lr nan", "must be greater than 0 and finite"),
        ("train language --lr inf", "must be greater than 0 and finite"),
        ("train language --lr 0", "must be greater than 0 and finite"),
        ("train language --clip 0", "must be greater than 0, or `none`"),
        ("train language --clip nan", "must be greater than 0, or `none`"),
        ("train language --clip much", "neither a number nor `none`"),
        ("train language --precision int8", "'int8' is not one of 'fp32', 'bf16', 'fp16'"),
        ("train language --schedule steep", "'steep' is not one of"),
        ("train language --size 2 --rows 2", "`--size` and `--rows` exclude each other"),
        ("train language --warmup 3", "`--warmup` without `--schedule`"),
        ("train language --minimum 0.1", "`--minimum` without `--schedule`"),
        ("train language --schedule linear --minimum 2", "a ratio from 0 to 1"),
        ("train language --schedule linear --warmup -1", "0 or more"),
        ("train language --schedule constant --minimum 0.1", "never falls"),
        ("train language --schedule inverse-sqrt", "Give `--warmup` in updates"),
        ("train language --seed -1", "must be from 0"),
        ("train language --seed 4294967296", "must be from 0"),
        ("trane", "Did you mean 'train'"),
        ("--wrong", "See `midstep --help`."),
    ],
)
def test_a_bad_argument_gets_one_clear_line(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.run(*arguments.split()) == 2
    line = tiny.one_line(capsys)
    assert words in line
    assert "--traceback" not in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--schedule cosine --warmup 20", "`--warmup 20` leaves none of 20 updates"),
        ("--schedule wsd --warmup 9 --steps 5", "leaves none of 5 updates"),
    ],
)
def test_options_that_do_not_fit_the_recipe_get_one_clear_line(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    assert tiny.run("train", recipe, "--out", tmp_path / "run", *options.split()) == 2
    assert words in tiny.one_line(capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (tiny.LOSS, "model(batch[0])", "The loss has shape [4, 3]"),
        (tiny.LOSS, "torch.tensor(1.0)", "The loss has no graph"),
        (tiny.LOSS, "3.0", "The loss is a `float`"),
        (tiny.LOSS, "model(batch[1])", "bad.py:18`: RuntimeError"),
        ("count=ms.targets()", "count=ms.rows()", "the window's count found 4"),
        ("count=ms.targets()", "count=ms.targets(key='labels')", "no `'labels'` in a list"),
        ("count=ms.targets()", "count=lambda batch: -1", "finite number of at least 0"),
        ("count=ms.targets()", "count=lambda batch: 0", "the window's count found 0"),
        ("y[::7] = -100", "y[:] = -100", "nothing was counted"),
        ("import midstep as ms", "import midstep as ms (", "bad.py:3`: SyntaxError"),
        ("torch.manual_seed(seed)", "raise OSError('no data')", "bad.py:6`: OSError: no data"),
        ("def recipe(seed)", "def another(seed)", "defines no function"),
        ("return ms.Recipe(", "return dict(", "returned a `dict`"),
        ("size=2,", "size=0,", "at least 1"),
        ("train=loader", "train=[]", "gave no batches"),
        (
            "torch.optim.AdamW(model.parameters(), lr=lr)",
            "torch.optim.LBFGS(model.parameters())",
            "closure",
        ),
        ("ms.schedules.cosine(total=steps, warmup=2)", "3", "`schedule` is a `int`"),
        (
            "model = torch.nn.Sequential(",
            "model = torch.nn.Sequential(torch.nn.LSTM(4, 4), ",
            "bad.py:18`: TypeError",
        ),
    ],
)
def test_a_bad_recipe_gets_one_clear_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, words: str
) -> None:
    path = tiny.write(tmp_path / "bad.py", (old, new))
    assert tiny.run("train", path, "--out", tmp_path / "run") == 2
    assert words in tiny.one_line(capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changed", "option", "words"),
    [
        ("count=ms.targets(),", ("--targets", 8), "without `count=`"),
        ("held_out=[(x[:8], y[:8])],", ("--evaluate-every", 2), "no held-out batches"),
    ],
)
def test_an_option_that_a_recipe_cannot_honour_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed: str,
    option: tuple[object, ...],
    words: str,
) -> None:
    path = tiny.write(tmp_path / "tiny.py", (changed, ""))
    assert tiny.run("train", path, "--out", tmp_path / "run", *option) == 2
    assert words in tiny.one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_a_failure_in_mid_run_names_its_line_and_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny.write(tmp_path / "bad.py", tiny.at_microbatch(18, "1 / 0"), tiny.COUNTING)
    folder = tmp_path / "run"
    assert tiny.run("train", path, "--out", folder, "--save-every", 3) == 2
    line = tiny.one_line(capsys)
    assert "bad.py:21`: ZeroDivisionError: division by zero." in line
    assert "The run is saved as it was after 6 updates" in line
    assert f"--resume {folder}` goes on from there." in line
    assert "`--traceback` shows where." in line
    assert len(tiny.lines(folder)) == 7
    path.write_text(tiny.RECIPE)
    assert tiny.run("train", "--resume", folder) == 0
    assert tiny.run("train", path, "--out", tmp_path / "straight") == 0
    assert tiny.same_end(folder, tmp_path / "straight")


def test_the_whole_traceback_is_shown_when_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny.write(tmp_path / "bad.py", (tiny.LOSS, "1 / 0"))
    assert tiny.run("train", path, "--out", tmp_path / "run", "--traceback") == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert 'bad.py", line 18' in err
    assert err.splitlines()[-1].endswith("bad.py:18`: ZeroDivisionError: division by zero.")


def test_a_non_finite_gradient_names_its_parameters_and_the_option_that_goes_past_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny.write(tmp_path / "bad.py", ("y[::7] = -100", "y[::7] = -100; x[:] = float('nan')"))
    assert tiny.run("train", path, "--out", tmp_path / "a") == 2
    line = tiny.one_line(capsys)
    assert "entries of the gradient are inf or nan, in `0.weight` (32)" in line
    assert "`--skip-nonfinite 5`" in line
    assert not (tmp_path / "a").exists()
    assert tiny.run("train", path, "--out", tmp_path / "b", "--skip-nonfinite", 2) == 2
    assert [line["verdict"] for line in tiny.lines(tmp_path / "b")] == ["skipped_nonfinite"] * 2


def test_a_warning_is_one_line_too(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "odd.py", ("model.parameters()", "model[0].parameters()"))
    process = tiny.start(path, "--out", tmp_path / "run", "--steps", 4)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert err.startswith("midstep: warning: 2 trainable parameters")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("out", ["tiny.py", "tiny.py/run", "/proc/run", "/dev/null/run"])
def test_a_folder_that_cannot_be_written_gets_one_line(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    assert tiny.run("train", recipe, "--out", tmp_path / out) == 2
    assert out in tiny.one_line(capsys)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 96 kB: one checkpoint and a half, and not all the records."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a disk needs rights that this process has not")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_checkpoint_and_records_whole(
    recipe: Path, tiny_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_disk / "run"
    options = ("--out", folder, "--steps", 900, "--save-every", 20, "--evaluate-every", 900)
    assert tiny.run("train", recipe, *options) == 2
    line = tiny.one_line(capsys)
    assert "No space left on device" in line
    assert f"--resume {folder}" in line
    assert tiny.weights(folder)
    num_updates = len(tiny.lines(folder))  # each line is whole
    assert 20 < num_updates < 900
    assert not list(folder.glob("*.part"))


def test_a_disk_that_holds_no_checkpoint_is_found_full_before_the_first_update(
    recipe: Path, tiny_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tiny_disk / "other").write_bytes(b"x" * 80_000)
    assert tiny.run("train", recipe, "--out", tiny_disk / "run") == 2
    assert "could not be written: [Errno 28] No space left on device" in tiny.one_line(capsys)
    assert not (tiny_disk / "run").exists()


def test_a_file_that_may_not_grow_leaves_checkpoint_and_records_whole(
    recipe: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    # The records outgrow the limit; the checkpoint, which is written again and again, does not.
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, 80_000));"
        "from midstep.cli import run; sys.exit(run(sys.argv[1:]))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, "train", recipe, "--steps", "900", "--save-every", "20",
         "--out", folder],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert process.returncode == 2, process.stderr
    assert len(process.stderr.splitlines()) == 1
    assert tiny.weights(folder)
    assert tiny.lines(folder)
    assert json.loads((folder / "run.json").read_text())["options"]["steps"] == 900
    assert tiny.run("train", "--resume", folder) == 0
    assert len(tiny.lines(folder)) == 900
