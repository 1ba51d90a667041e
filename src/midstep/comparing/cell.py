"""A cell: one run of a comparison in a process of its own, guarded against a blow-up."""

from __future__ import annotations

import enum
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..recipes.held_out import HeldOut
    from ..recipes.training import Training
    from ..records import UpdateRecord
    from .grid import Cell

__all__ = ["Ending", "ending_of", "run_cell", "write_task"]

_TASK = "cell.json"
_ENDING = "ending.json"
_NUM_RECENT = 20  # updates whose median loss is compared


class Ending(enum.StrEnum):
    """How a cell ended."""

    COMPLETE = "complete"
    BLEW_UP = "blew_up"
    NONFINITE = "nonfinite"


class Guard:
    """Stops a run that is lost, so that it costs no more and is counted as what it is.

    Lost is a loss whose median over 20 updates stands above the best such median by thrice the
    whole fall until then, or twice the first loss where it never fell.
    """

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._first: float | None = None
        self._best = float("inf")
        self.is_lost = False

    def on_update(self, record: UpdateRecord) -> None:
        """See a loss."""
        if record.applied and record.loss_mean is not None:
            self._losses = [*self._losses, record.loss_mean][-_NUM_RECENT:]
        if len(self._losses) < _NUM_RECENT:
            return
        middle = statistics.median(self._losses)
        self._first = middle if self._first is None else self._first
        self._best = min(self._best, middle)
        margin = max(3 * (self._first - self._best), abs(self._first), 1e-6)
        self.is_lost = middle - self._best > margin

    def on_held_out(self, held_out: HeldOut) -> None:
        """Nothing to see here."""

    def __call__(self) -> bool:
        return self.is_lost


def write_task(cell: Cell, recipe: str) -> None:
    """Write what the process of a cell has to do.

    Raises:
        OSError: It cannot be written.
    """
    cell.path.mkdir(parents=True, exist_ok=True)
    task = {"recipe": recipe, "options": cell.options.to_json(), "variant": cell.variant.name}
    (cell.path / _TASK).write_text(json.dumps(task) + "\n", encoding="utf-8")


def ending_of(path: Path) -> Ending | None:
    """Say how the cell in a folder ended; None while it has not."""
    try:
        return Ending(json.loads((path / _ENDING).read_text(encoding="utf-8"))["ending"])
    except FileNotFoundError:
        return None


def run_cell(path: Path) -> Ending:
    """Run the cell of a folder to its end, from its last checkpoint where there is one.

    Raises:
        MidstepError: The recipe cannot be trained so.
        ValueError: The options do not fit the recipe.
    """
    from ..errors import NonFiniteGradient

    task = json.loads((path / _TASK).read_text(encoding="utf-8"))
    training = _training(path, task)
    guard = Guard()
    try:
        with training.folder:
            for record in training.folder.records():
                guard.on_update(record)
            training.run(guard, should_stop=guard)
        ending = Ending.COMPLETE if training.is_complete and not guard() else Ending.BLEW_UP
    except NonFiniteGradient:
        ending = Ending.NONFINITE
    part = path / f"{_ENDING}.part"
    part.write_text(json.dumps({"ending": ending}) + "\n", encoding="utf-8")
    part.replace(path / _ENDING)
    training.folder.checkpoint.unlink(missing_ok=True)  # weights of a finished cell are not needed
    return ending


def _training(path: Path, task: Mapping[str, Any]) -> Training:
    from ..cli.identity import about
    from ..cli.options import Options
    from ..recipes.folder import RunFolder
    from ..recipes.loading import find_recipe, load_recipe
    from ..recipes.settings import make_updater
    from ..recipes.training import Training

    source = find_recipe(task["recipe"])
    options = Options().over(task["options"])
    recipe = load_recipe(source, seed=options.seed or 0)
    settings = options.settings(recipe)
    updater = make_updater(recipe, settings)
    if (path / "checkpoint.pt").exists():
        training = Training(recipe, settings, updater, RunFolder.open(path))
        training.resume()
        return training
    for name in ("run.json", "updates.jsonl", "held_out.jsonl"):  # begun, and killed before a save
        (path / name).unlink(missing_ok=True)
    folder = RunFolder.create(path, about(source, options, settings, recipe, num_ranks=1))
    training = Training(recipe, settings, updater, folder)
    training.begin()
    return training
