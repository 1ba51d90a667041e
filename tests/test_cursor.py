"""A run that is continued reads the rows that the uninterrupted run reads, whatever feeds it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import LOADERS, WAYS, Run, Stateful, plain_batches
from torch.utils.data import DataLoader, TensorDataset

import midstep as ms
from midstep.cursor import Cursor

EPOCHS = 3


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_run_continued_after_any_window_is_the_uninterrupted_run(
    loader: str, way: str, tmp_path: Path
) -> None:
    whole = Run.made(loader, way)
    num_windows = len(list(whole.windows_left(EPOCHS)))
    expected = whole.outcome()
    # In the middle of a pass, after its last window, after the first of the next.
    per_epoch = num_windows // EPOCHS
    for stop in {1, per_epoch - 1, per_epoch, per_epoch + 1, num_windows}:
        first = Run.made(loader, way)
        for record in first.windows_left(EPOCHS):
            if record.update == stop:
                first.save(tmp_path / "checkpoint.pt")
                break
        second = Run.made(loader, way, seed=99)  # another start, all of which must be put back
        second.records = first.records
        ms.load(tmp_path / "checkpoint.pt", second.updater)
        list(second.windows_left(EPOCHS))
        assert second.outcome() == expected, f"stopped after update {stop}"


@pytest.mark.parametrize("loader", LOADERS)
def test_a_run_continued_between_two_passes_is_the_uninterrupted_run(
    loader: str, tmp_path: Path
) -> None:
    """Nothing of a pass is open, and yet the order of the next depends on those before."""
    whole = Run.made(loader)
    list(whole.windows_left(EPOCHS))
    expected = whole.outcome()
    first = Run.made(loader)
    list(first.windows_left(2))
    first.save(tmp_path / "checkpoint.pt")
    second = Run.made(loader, seed=99)
    second.records = first.records
    ms.load(tmp_path / "checkpoint.pt", second.updater)
    list(second.windows_left(EPOCHS))
    assert second.outcome() == expected


def test_a_checkpoint_from_before_the_first_window_begins_at_the_beginning(tmp_path: Path) -> None:
    whole = Run.made()
    whole.save(tmp_path / "checkpoint.pt")
    list(whole.windows_left(1))
    expected = whole.outcome()
    second = Run.made(seed=99)
    ms.load(tmp_path / "checkpoint.pt", second.updater)
    list(second.windows_left(1))
    assert second.outcome() == expected


@pytest.mark.parametrize("loader", ["shuffled", "shuffled with a generator", "stateful"])
def test_a_run_may_be_continued_again_and_again(loader: str, tmp_path: Path) -> None:
    whole = Run.made(loader)
    num_windows = len(list(whole.windows_left(EPOCHS)))
    expected = whole.outcome()
    records: list[ms.UpdateRecord] = []
    path = tmp_path / "checkpoint.pt"
    for start in range(num_windows):  # one window a life
        run = Run.made(loader, seed=start)
        run.records = records
        if start:
            ms.load(path, run.updater)
        next(iter(run.windows_left(EPOCHS)))
        run.save(path)
    run = Run.made(loader, seed=1234)
    run.records = records
    ms.load(path, run.updater)
    list(run.windows_left(EPOCHS))
    assert run.outcome() == expected


def test_a_checkpoint_of_a_checkpoint_that_was_not_gone_on_with_is_the_same(tmp_path: Path) -> None:
    whole = Run.made()
    list(whole.windows_left(EPOCHS))
    expected = whole.outcome()
    first = Run.made()
    next(iter(first.windows_left(EPOCHS)))
    first.save(tmp_path / "a.pt")
    between = Run.made(seed=5)
    ms.load(tmp_path / "a.pt", between.updater)
    between.save(tmp_path / "b.pt")
    last = Run.made(seed=6)
    last.records = first.records
    ms.load(tmp_path / "b.pt", last.updater)
    list(last.windows_left(EPOCHS))
    assert last.outcome() == expected


@pytest.mark.parametrize("loader", ["shuffled", "shuffled with a generator", "noisy", "iterable"])
def test_a_streamed_window_ended_early_is_no_loss(loader: str, tmp_path: Path) -> None:
    """One batch was read ahead that no window has used; it is the next one's first."""

    def windows(run: Run) -> Any:
        while run.updater.clock.epoch < 2:
            for window in run.updater.windows(run.loader, size=3):
                for batch in window:
                    with window.forward():
                        value = run.loss(run.updater.model, batch)
                    window.backward(value)
                    if window.index == 1:
                        break
                run.records.append(window.step())
                yield run.records[-1]

    whole = Run.made(loader, "size, streamed")
    list(windows(whole))
    expected = whole.outcome()
    first = Run.made(loader, "size, streamed")
    steps = windows(first)
    next(steps)
    next(steps)
    first.save(tmp_path / "checkpoint.pt")
    steps.close()
    second = Run.made(loader, "size, streamed", seed=99)
    second.records = first.records
    ms.load(tmp_path / "checkpoint.pt", second.updater)
    list(windows(second))
    assert second.outcome() == expected


def test_a_stateful_loader_cannot_give_back_a_batch_that_was_read_ahead(tmp_path: Path) -> None:
    run = Run.made("stateful", "size, streamed")
    windows = run.updater.windows(run.loader, size=3)
    window = next(windows)
    for batch in window:
        window.backward(run.loss(run.updater.model, batch))
        break
    window.step()
    with pytest.raises(ms.CheckpointError, match="one batch has been read"):
        run.save(tmp_path / "checkpoint.pt")
    assert not (tmp_path / "checkpoint.pt").exists()
    windows.close()  # type: ignore[attr-defined]


def test_workers_are_replayed_too(tmp_path: Path) -> None:
    def made(seed: int) -> Run:
        run = Run.made(seed=seed)
        data = LOADERS["augmented"]().dataset
        run.loader = DataLoader(data, batch_size=3, shuffle=True, num_workers=1)
        return run

    whole = made(0)
    list(whole.windows_left(1))
    expected = whole.outcome()
    first = made(0)
    steps = first.windows_left(1)
    next(steps)
    first.save(tmp_path / "checkpoint.pt")
    second = made(99)
    second.records = list(first.records)
    list(steps)  # workers that are not read to their end take 5 seconds to go
    ms.load(tmp_path / "checkpoint.pt", second.updater)
    list(second.windows_left(1))
    assert second.outcome() == expected


# -- what cannot be gone on with -----------------------------------------------------------------


def stopped(loader: str, path: Path) -> None:
    run = Run.made(loader)
    next(iter(run.windows_left(EPOCHS)))
    run.save(path)


@pytest.mark.parametrize("rows", [3, 6, 30])
def test_data_of_another_length_are_refused(rows: int, tmp_path: Path) -> None:
    stopped("list", tmp_path / "checkpoint.pt")
    run = Run.made("list")
    ms.load(tmp_path / "checkpoint.pt", run.updater)
    run.loader = plain_batches()[:1] * rows
    with pytest.raises(ms.CheckpointError, match=r"loader has .* batches"):
        next(iter(run.windows_left(EPOCHS)))


def test_a_pass_of_unknown_length_that_is_too_short_is_refused(tmp_path: Path) -> None:
    stopped("iterable", tmp_path / "checkpoint.pt")
    run = Run.made("iterable")
    ms.load(tmp_path / "checkpoint.pt", run.updater)
    run.loader = iter(plain_batches()[:2])
    with pytest.raises(ms.CheckpointError, match="ended after 2 batches"):
        next(iter(run.windows_left(EPOCHS)))


def test_a_stateful_loaders_place_needs_a_stateful_loader(tmp_path: Path) -> None:
    stopped("stateful", tmp_path / "checkpoint.pt")
    run = Run.made("stateful")
    ms.load(tmp_path / "checkpoint.pt", run.updater)
    run.loader = iter(plain_batches())
    with pytest.raises(ms.CheckpointError, match="stateful loader's own place"):
        next(iter(run.windows_left(EPOCHS)))


def test_a_stateful_loader_is_asked_for_its_place_and_not_read_again(tmp_path: Path) -> None:
    stopped("stateful", tmp_path / "checkpoint.pt")
    run = Run.made("stateful")
    ms.load(tmp_path / "checkpoint.pt", run.updater)
    loader: Stateful = run.loader
    next(iter(run.windows_left(EPOCHS)))
    assert loader.position == 18  # six batches of three, the last three of which were read here


def test_a_pass_over_other_data_between_two_passes_begins_afresh(tmp_path: Path) -> None:
    """Where a run changes to another loader, the one before has nothing to say about it."""
    first = Run.made("shuffled with a generator")
    list(first.windows_left(1))
    first.save(tmp_path / "checkpoint.pt")
    second = Run.made()
    ms.load(tmp_path / "checkpoint.pt", second.updater)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 4)
    other = DataLoader(
        TensorDataset(x, torch.zeros(5).long()), batch_size=5, shuffle=True, generator=generator
    )
    order = next(iter(DataLoader(x, batch_size=5, shuffle=True, generator=generator)))
    generator.manual_seed(1)
    seen = []
    for window in second.updater.windows(other, size=1):
        for batch in window:
            seen.append(batch[0])
            window.backward(second.loss(second.updater.model, batch))
        window.step()
    assert torch.equal(seen[0], order)


def test_a_cursor_that_was_never_opened_has_no_place() -> None:
    assert Cursor().state_dict() is None
