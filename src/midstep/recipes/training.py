"""Training: the loop over a recipe, with records, held-out losses and checkpoints on the way.

The updater owns the order of a step; here is what happens between steps. A run can stop after any
update and go on as if it had not: what is recorded never runs ahead of what can be made again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..checkpoint import load, save
from ..cutting import cutting_of
from ..errors import RecipeError
from ..records import UpdateRecord
from ..updater import Updater
from .folder import RunFolder
from .held_out import HeldOut, measure
from .recipe import Recipe
from .settings import Settings
from .spread import Spread
from .summary import Summary

__all__ = ["Training", "Watcher"]


class Watcher(Protocol):
    """Whoever shows a run to somebody. In a run of many ranks only rank 0 has one that speaks."""

    def on_update(self, record: UpdateRecord) -> None:
        """See the record of an update."""
        ...

    def on_held_out(self, held_out: HeldOut) -> None:
        """See a held-out loss."""
        ...


class Training:
    """One run of a recipe in a folder. `begin` or `resume` it, then `run`.

    Args:
        recipe: What is trained; made after the seed was set.
        settings: How.
        updater: Made of the two.
        folder: Where everything is written.
        spread: Over which ranks; None for one process.
    """

    def __init__(
        self,
        recipe: Recipe,
        settings: Settings,
        updater: Updater,
        folder: RunFolder,
        spread: Spread | None = None,
    ) -> None:
        self.recipe = recipe
        self.settings = settings
        self.updater = updater
        self.folder = folder
        self.spread = spread or Spread()
        self.saved_step = 0  # applied updates in the last checkpoint
        way = cutting_of(
            size=settings.size,
            rows=settings.rows,
            targets=settings.targets,
            drop_tail=False,
            count=recipe.count,
        )
        self._data, self._way = self.spread.share(
            recipe.train, way, settings.size, seed=settings.seed
        )
        updater._feed.cursor.is_shared = True  # noqa: SLF001 - whoever shares out knows it
        self._measured: set[int] = set()  # after how many applied updates
        self._saved_update: int | None = None
        self._watcher: Watcher = _Nobody()
        self._stop = self.spread.agreed(_never, updater)

    @property
    def is_complete(self) -> bool:
        """Whether every update was applied and everything due has been measured."""
        return self.updater.clock.step >= self.settings.steps and not self._owes_held_out()

    def begin(self) -> None:
        """Save the run as it is before its first update.

        A full disk, or a state that cannot be saved, shows now instead of after an hour; and a run
        that is killed at any moment can go on.

        Raises:
            CheckpointError: It cannot be written.
            TypeError: A state holds something that a safe load could not read back.
        """
        self._save_if_new()

    def resume(self) -> None:
        """Go back to the last checkpoint, and drop what was recorded after it.

        Raises:
            CheckpointError: There is none, it does not fit, or records before it are missing.
        """
        load(self.folder.checkpoint, self.updater)
        self._note_saved()
        self._measured = self.spread.first(self._rewind)

    def run(self, watcher: Watcher, *, should_stop: Callable[[], bool] | None = None) -> None:
        """Train until the last update was applied, or until asked to stop; then save.

        Args:
            watcher: Sees what happens.
            should_stop: Asked after each update and each held-out batch.

        Raises:
            RecipeError: A whole pass over the training batches gave no window.
            MidstepError: An update could not be made; what was saved before is whole.
            OSError: A record could not be written.
        """
        self._watcher = watcher
        self._stop = self.spread.agreed(should_stop or _never, self.updater)
        self._measure_if_due()  # a run may have been stopped before it could
        num_empty_passes = 0
        while not self._is_over():
            before = self.updater.clock.update
            self._run_pass()
            # A pass that was resumed at its very end has nothing left either, once.
            num_empty_passes = num_empty_passes + 1 if before == self.updater.clock.update else 0
            if num_empty_passes == 2 and not self._is_over():
                raise RecipeError(
                    "`Recipe.train` gave no batches, so there is nothing to train on. Give "
                    "something that can be iterated once an epoch, such as a `DataLoader`; a "
                    "generator is empty after its first pass."
                )
        self._save_if_new()

    def summary(self) -> Summary:
        """Add up what the folder holds."""
        measured = list(self.folder.held_out())
        return Summary.of(
            self.folder.records(),
            held_out=measured[-1] if measured else None,
            baselines=self.recipe.baselines,
            notes=self.recipe.notes,
        )

    def _rewind(self) -> set[int]:
        clock = self.updater.clock
        self.folder.rewind(update=clock.update, step=clock.step)
        return {held_out.step for held_out in self.folder.held_out()}

    def _run_pass(self) -> None:
        updater, count = self.updater, self.recipe.count
        windows = updater._windows(self._data, self._way, count, updater.empty)  # noqa: SLF001 - it is cut as no user's would be
        for window in windows:
            record = self.updater.update(window, self.recipe.loss)
            self.folder.add_record(record)
            self._watcher.on_update(record)
            if record.applied:
                self._measure_if_due()
                if record.step % self.settings.save_every == 0:
                    self._save_if_new()
            if self._is_over():
                self._save_if_new()  # inside the pass, so that the place in the data is saved
                return

    def _is_over(self) -> bool:
        return self.updater.clock.step >= self.settings.steps or self._stop()

    def _save_if_new(self) -> None:
        clock = self.updater.clock
        if clock.update != self._saved_update:
            self.spread.require_alike(
                "another order of the data",
                self._data.mark,
                "Give its loader a `torch.Generator` seeded by the seed, and the same data on all "
                "ranks, or rows are seen twice and others never.",
            )
            self.folder.sync()
            save(self.folder.checkpoint, self.updater)
            self._note_saved()

    def _note_saved(self) -> None:
        self._saved_update = self.updater.clock.update
        self.saved_step = self.updater.clock.step

    def _measure_if_due(self) -> None:
        if not self._owes_held_out():
            return
        clock = self.updater.clock
        held_out = measure(
            self.recipe,
            precision=self.updater.precision,
            step=clock.step,
            update=clock.update,
            should_stop=self._stop.now,
            spread=self.spread,
        )
        if held_out is not None:
            self._measured.add(held_out.step)
            self.folder.add_held_out(held_out)
            self._watcher.on_held_out(held_out)

    def _owes_held_out(self) -> bool:
        step, settings = self.updater.clock.step, self.settings
        is_due = step > 0 and (step % settings.evaluate_every == 0 or step >= settings.steps)
        return self.recipe.held_out is not None and is_due and step not in self._measured


class _Nobody:
    def on_update(self, record: UpdateRecord) -> None:
        """See nothing."""

    def on_held_out(self, held_out: HeldOut) -> None:
        """See nothing."""


def _never() -> bool:
    return False
