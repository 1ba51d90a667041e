"""Settings: everything that decides a run besides its recipe, with nothing left open.

A run is its recipe, its settings and its seed. The settings can be put in words, which is how a
run is described in `run.json`, and how a resumed one is held against it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from ..clip.rule import Rule
from ..counts import unit_of
from ..cutting import cutting_of
from ..nonfinite import Policy, Raise
from ..precision import Precision
from ..updater import Updater
from .observing import default_observers, every_observer
from .recipe import Recipe
from .share import require_turns
from .spread import Spread

__all__ = ["Settings", "make_updater"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a recipe is trained.

    Attributes:
        seed: Of every random stream, set before the recipe was made.
        size: Batches a window; exactly one of `size`, `rows` and `targets` is given.
        rows: Each batch is a window, cut into microbatches of at most so many rows.
        targets: As many batches a window as hold at least so many targets.
        precision: What the forward runs in.
        clip: Bounds the gradient; None only measures it.
        nonfinite: What to do when a gradient is not finite.
        schedule: From the number of applied updates to the factor on the base rate.
        lr: Base rate.
        steps: Applied updates of the whole run.
        save_every: Applied updates between two checkpoints.
        evaluate_every: Applied updates between two held-out losses.
        observe: Record everything that can be observed, at every update.
    """

    seed: int
    size: int | None = None
    rows: int | None = None
    targets: int | None = None
    precision: Precision
    clip: Rule | None = None
    nonfinite: Policy = dataclasses.field(default_factory=Raise)
    schedule: Callable[[int], float] | None = None
    lr: float
    steps: int
    save_every: int
    evaluate_every: int
    observe: bool = False

    def words(self) -> dict[str, Any]:
        """Put every setting in plain values, the same in every process."""
        return {field.name: _word(getattr(self, field.name)) for field in dataclasses.fields(self)}


def make_updater(recipe: Recipe, settings: Settings, spread: Spread | None = None) -> Updater:
    """Make the updater of a run.

    Args:
        recipe: Its model may be changed in place, where it is sharded.
        settings: How it is trained.
        spread: Over which ranks; None for one process.

    Raises:
        ValueError: The settings do not fit the recipe: no `count` for `targets`, a precision that
            cannot train these parameters, fewer batches in a window than ranks.
        TypeError: The recipe's optimizer is none that steps on `.grad`.
    """
    spread = spread or Spread()
    cutting_of(  # now: refused before anything is written
        size=settings.size,
        rows=settings.rows,
        targets=settings.targets,
        drop_tail=False,
        count=recipe.count,
    )
    require_turns(settings.size, spread.num_ranks)
    model = spread.wrap(recipe.model, seed=settings.seed)
    return Updater(
        model,
        recipe.optimizer(recipe.model, settings.lr),
        clip=settings.clip,
        precision=settings.precision,
        nonfinite=settings.nonfinite,
        schedule=settings.schedule,
        observers=(
            every_observer(unit=unit_of(recipe.count)) if settings.observe else default_observers()
        ),
    )


def _word(value: object) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    name = getattr(value, "__qualname__", None)  # of a function, whose repr holds an address
    return name if isinstance(name, str) else re.sub(r" at 0x[0-9a-f]+", "", repr(value))
