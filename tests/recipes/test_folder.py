"""The folder of a run: never overwritten, rewound to its checkpoint, held by one process."""

import json
from pathlib import Path

import pytest

import midstep as ms
from midstep.errors import CheckpointError
from midstep.recipes.folder import RunFolder, new_path
from midstep.recipes.held_out import HeldOut


def record(update: int) -> ms.UpdateRecord:
    return ms.UpdateRecord(
        update=update, step=update, verdict=ms.Verdict.APPLIED, num_microbatches=1,
        denominators={"loss": 1}, loss_means={"loss": 1.0}, loss_mean=1.0, grad_norm=1.0,
        clip_coefficient=1.0, clipped=False, lr=[0.1], loss_scale=1.0, num_nonfinite=0, seconds=0.1,
    )  # fmt: skip


def held_out(step: int) -> HeldOut:
    return HeldOut(
        step=step, update=step, loss_mean=1.0, loss_means={"loss": 1.0}, denominators={"loss": 1},
        seconds=0.1,
    )  # fmt: skip


def begun(path: Path, updates: int = 5) -> None:
    with RunFolder.create(path, {"recipe": "mine"}) as folder:
        for number in range(1, updates + 1):
            folder.add_record(record(number))
            if number % 2 == 0:
                folder.add_held_out(held_out(number))


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_run_reads_back_what_was_written(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    with RunFolder.open(tmp_path / "run") as folder:
        assert folder.about["recipe"] == "mine"
        assert list(folder.records()) == [record(number) for number in range(1, 6)]
        assert list(folder.held_out()) == [held_out(2), held_out(4)]


@pytest.mark.parametrize("name", ["run.json", "updates.jsonl", "held_out.jsonl", "checkpoint.pt"])
def test_a_folder_that_holds_any_part_of_a_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("something")
    with pytest.raises(FileExistsError, match="holds a run already"):
        RunFolder.create(tmp_path, {})
    assert contents(tmp_path) == {name: b"something"}


def test_a_folder_with_other_files_is_welcome(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder.create(tmp_path, {}).close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_rewinding_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    begun(tmp_path)
    with RunFolder.open(tmp_path) as folder:
        folder.rewind(update=3, step=3)
        folder.add_record(record(4))
        assert [r.update for r in folder.records()] == [1, 2, 3, 4]
        assert [h.step for h in folder.held_out()] == [2]


def test_a_line_that_a_crash_cut_short_is_not_read_and_not_lost_for_others(tmp_path: Path) -> None:
    begun(tmp_path, updates=4)
    for name in ("updates.jsonl", "held_out.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"update":5,"st')
    with RunFolder.open(tmp_path) as folder:
        assert len(list(folder.records())) == 4
        assert len(list(folder.held_out())) == 2
        folder.rewind(update=4, step=4)
        folder.add_record(record(5))
        folder.add_held_out(held_out(6))
        assert [r.update for r in folder.records()] == [1, 2, 3, 4, 5]
        assert [h.step for h in folder.held_out()] == [2, 4, 6]


def test_missing_records_are_refused(tmp_path: Path) -> None:
    begun(tmp_path, updates=3)
    with (
        RunFolder.open(tmp_path) as folder,
        pytest.raises(CheckpointError, match="holds 3 records"),
    ):
        folder.rewind(update=4, step=4)


def test_a_line_that_is_no_record_is_refused_and_kept(tmp_path: Path) -> None:
    begun(tmp_path, updates=3)
    text = (tmp_path / "updates.jsonl").read_text()
    (tmp_path / "updates.jsonl").write_text(f"not a record\n{text}")
    before = contents(tmp_path)
    with RunFolder.open(tmp_path) as folder, pytest.raises(CheckpointError, match="no record"):
        folder.rewind(update=2, step=2)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "holds no run"),
        ("{", "cannot be read"),
        ("[]", "does not describe a run"),
        (json.dumps({"format": "midstep run", "schema": 99}), "has schema 99"),
    ],
)
def test_what_does_not_describe_a_run_is_refused(
    tmp_path: Path, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(CheckpointError, match=words):
        RunFolder.open(tmp_path)


def test_a_run_is_held_by_one_process_until_it_lets_go(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, {}), pytest.raises(CheckpointError, match="in use by another"):
        RunFolder.open(tmp_path)
    RunFolder.open(tmp_path).close()


def test_a_run_without_an_update_is_removed_and_one_with_records_is_not(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "empty", {}) as folder:
        assert folder.discard_if_empty()
    assert not (tmp_path / "empty").exists()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "notes.txt").write_text("mine")
    with RunFolder.create(tmp_path / "shared", {}) as folder:
        assert folder.discard_if_empty()
    assert contents(tmp_path / "shared") == {"notes.txt": b"mine"}
    begun(tmp_path / "run", updates=0)
    with RunFolder.open(tmp_path / "run") as folder:
        assert not folder.discard_if_empty(), "it was begun by another process"
    with RunFolder.create(tmp_path / "other", {}) as folder:
        folder.add_record(record(1))
        assert not folder.discard_if_empty()


def test_the_next_folder_is_the_first_that_is_free(tmp_path: Path) -> None:
    assert new_path(tmp_path, "language") == tmp_path / "language-1"
    (tmp_path / "language-1").mkdir()
    (tmp_path / "language-3").mkdir()
    assert new_path(tmp_path, "language") == tmp_path / "language-2"
