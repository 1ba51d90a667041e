"""A run that goes on is the uninterrupted run; what would make it another one is refused."""

import contextlib
import hashlib
import json
import random
import time
from pathlib import Path

import pytest
import tiny
import torch


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "tiny.py")


def stopped_after(path: Path, microbatch: int, folder: Path, *options: object) -> None:
    """Train until a microbatch, counted with held-out batches, asks to stop."""
    text = path.read_text()
    tiny.write(
        path, tiny.at_microbatch(microbatch, "os.kill(os.getpid(), signal.SIGINT)"), tiny.COUNTING
    )
    assert tiny.run("train", path, "--out", folder, *options) == 130
    path.write_text(text)
    about = json.loads((folder / "run.json").read_text())
    about["recipe_sha256"] = hashlib.sha256(text.encode()).hexdigest()  # it goes on without asking
    (folder / "run.json").write_text(json.dumps(about))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("microbatch", [1, 19, 26])  # in the first window, in a pass, at its end
def test_a_stopped_run_goes_on_bit_for_bit(
    recipe: Path, tmp_path: Path, precision: str, microbatch: int
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    options = ("--precision", precision, "--seed", 3)
    assert tiny.run("train", recipe, "--out", straight, *options) == 0
    stopped_after(recipe, microbatch, broken, *options)
    assert 0 < len(tiny.lines(broken)) < 20
    assert tiny.run("train", "--resume", broken) == 0
    assert len(tiny.lines(broken)) == 20
    assert tiny.same_end(straight, broken)


def test_ten_updates_and_ten_more_are_twenty(recipe: Path, tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert tiny.run("train", recipe, "--out", straight) == 0
    stopped_after(recipe, 24, broken)  # 10 updates of 2, and 4 held-out losses before the last
    assert len(tiny.lines(broken)) == 10
    assert tiny.run("train", "--resume", broken) == 0
    assert tiny.same_end(straight, broken)


def test_a_held_out_loss_that_was_broken_off_is_measured_first(
    recipe: Path, tmp_path: Path
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    tiny.write(recipe, ("[(x[:8], y[:8])]", "[(x[:8], y[:8]), (x[8:9], y[8:9])]"))
    before = recipe.read_text()
    assert tiny.run("train", recipe, "--out", straight, "--evaluate-every", 5) == 0
    changes = (tiny.at_microbatch(11, "os.kill(os.getpid(), signal.SIGINT)"), tiny.COUNTING)
    text = before
    for old, new in changes:
        text = text.replace(old, new)
    recipe.write_text(text)
    assert tiny.run("train", recipe, "--out", broken, "--evaluate-every", 5) == 130
    assert len(tiny.lines(broken)) == 5
    assert not (broken / "held_out.jsonl").exists()
    recipe.write_text(before)
    assert tiny.run("train", "--resume", broken) == 0
    assert tiny.same_end(straight, broken)


@pytest.mark.parametrize("seed", range(3))
def test_a_run_killed_at_any_moment_goes_on_to_the_same_end(
    recipe: Path, tmp_path: Path, seed: int
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    tiny.write(recipe, tiny.SLOW)
    process = tiny.start(recipe, "--out", broken, "--save-every", 3, "--evaluate-every", 2)
    tiny.wait_for_updates(broken, 1 + 5 * seed)
    time.sleep(random.Random(seed).uniform(0.0, 0.1))
    process.kill()
    process.communicate()
    assert tiny.run("train", recipe, "--out", straight, "--evaluate-every", 2) == 0
    assert tiny.run("train", "--resume", broken) == 0
    assert tiny.same_end(straight, broken)


def test_a_finished_run_is_summed_up_again_and_left_as_it_is(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert tiny.run("train", recipe, "--out", folder) == 0
    out = capsys.readouterr().out
    summary = out[out.index("\nupdates  ") + 1 :].splitlines()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert tiny.run("train", "--resume", folder) == 0
    assert capsys.readouterr().out.splitlines() == summary
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--lr", 0.1), "`lr` 0.01, not 0.1"),
        (("--steps", 30), "`steps` 20, not 30"),
        (("--seed", 1), "`seed` 0, not 1"),
        (("--size", 3), "`size` 2, not 3"),
        (("--rows", 2), "`rows` none, not 2"),
        (("--clip", "none"), "`clip` ByGlobalNorm(max_norm=0.5, p=2.0), not none"),
        (("--clip", 0.25), "not ByGlobalNorm(max_norm=0.25, p=2.0)"),
        (("--precision", "bf16"), "`precision` FP32(), not BF16()"),
        (("--schedule", "linear"), "another `schedule`"),
        (("--skip-nonfinite", 3), "`nonfinite` Raise"),
    ],
)
def test_an_option_that_contradicts_the_run_is_refused(
    recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[object, ...],
    words: str,
) -> None:
    folder = tmp_path / "run"
    stopped_after(recipe, 5, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    capsys.readouterr()
    assert tiny.run("train", "--resume", folder, *options) == 2
    err = capsys.readouterr().err
    assert "was begun with" in err
    assert words in err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_options_that_say_the_same_or_change_no_weight_are_taken(
    recipe: Path, tmp_path: Path
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    given = ("--clip", "none", "--schedule", "wsd", "--warmup", 2, "--precision", "bf16")
    assert tiny.run("train", recipe, *given, "--out", straight, "--evaluate-every", 4) == 0
    stopped_after(recipe, 9, broken, *given, "--evaluate-every", 4)
    again = ("--lr", 0.01, "--size", 2, "--clip", "none", "--save-every", 7, "--out", broken)
    assert tiny.run("train", recipe, "--resume", broken, *again) == 0
    assert tiny.same_end(straight, broken)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("language --resume run", "is a run of the recipe"),
        ("--resume run --out other", "goes on in its own folder"),
        ("--resume nowhere", "holds no run"),
        ("--resume tiny.py", "holds no run"),
    ],
)
def test_a_run_that_cannot_be_meant_is_refused(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    with contextlib.chdir(tmp_path):
        assert tiny.run("train", recipe, "--out", "run", "--steps", 4) == 0
        capsys.readouterr()
        assert tiny.run("train", *arguments.split()) == 2
    assert words in tiny.one_line(capsys)


def test_a_recipe_that_was_edited_and_other_versions_are_told(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert tiny.run("train", recipe, "--out", folder, "--steps", 4) == 0
    recipe.write_text(recipe.read_text() + "# a note\n")
    about = json.loads((folder / "run.json").read_text())
    about["versions"]["torch"] = "1.0"
    (folder / "run.json").write_text(json.dumps(about))
    capsys.readouterr()
    assert tiny.run("train", "--resume", folder) == 0
    err = capsys.readouterr().err
    assert "has changed since the run was begun" in err
    assert f"begun with torch 1.0 and goes on with {torch.__version__}" in err


def test_an_edit_that_changes_a_setting_is_refused(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert tiny.run("train", recipe, "--out", folder, "--steps", 4) == 0
    tiny.write(recipe, ("lr=0.01", "lr=0.02"))
    capsys.readouterr()
    assert tiny.run("train", "--resume", folder) == 2
    assert "`lr` 0.01, not 0.02" in tiny.one_line(capsys)


@pytest.mark.parametrize("content", [b"torn", b"", None])
def test_an_unreadable_checkpoint_changes_nothing(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    folder = tmp_path / "run"
    stopped_after(recipe, 9, folder)
    if content is None:
        (folder / "checkpoint.pt").unlink()
    else:
        (folder / "checkpoint.pt").write_bytes(content)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    capsys.readouterr()
    assert tiny.run("train", "--resume", folder) == 2
    assert "checkpoint" in tiny.one_line(capsys)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_records_that_are_missing_are_refused(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    stopped_after(recipe, 9, folder)
    text = (folder / "updates.jsonl").read_text()
    (folder / "updates.jsonl").write_text(text.partition("\n")[2])
    capsys.readouterr()
    assert tiny.run("train", "--resume", folder) == 2
    assert "records are missing" in tiny.one_line(capsys)


def test_two_processes_do_not_train_one_run(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tiny.write(recipe, tiny.SLOW)
    process = tiny.start(recipe, "--out", folder, "--steps", 500)
    try:
        tiny.wait_for_updates(folder, 1)
        assert tiny.run("train", "--resume", folder) == 2
        assert folder.exists()
    finally:
        process.kill()
        process.communicate()
    assert all(json.loads(line) for line in (folder / "updates.jsonl").read_text().splitlines())
