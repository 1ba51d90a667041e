"""Options of a run, as they are typed: what is given replaces what the recipe says.

Checked as far as that goes without the recipe, and without importing torch.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..clip.rule import Rule
    from ..precision import Precision
    from ..recipes.recipe import Recipe
    from ..recipes.settings import Settings

__all__ = ["Options", "ParallelName", "PrecisionName", "ScheduleName"]

DEFAULT_SEED = 0
DECAY_SHARE = 5  # warm-up, stable, decay: the last fifth decays; Hagele et al. 2024 use 10 to 20 %


class PrecisionName(enum.StrEnum):
    """Precisions by the name that is typed."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class ScheduleName(enum.StrEnum):
    """Schedules by the name that is typed."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"
    INVERSE_SQRT = "inverse-sqrt"


class ParallelName(enum.StrEnum):
    """Ways for ranks to share a model, by the name that is typed."""

    DDP = "ddp"
    FSDP = "fsdp"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was typed; None where nothing was.

    Attributes:
        seed: Of every random stream, from 0 to 2**32 - 1.
        size: Batches a window.
        rows: Rows a microbatch; each batch is a window.
        targets: Targets a window.
        precision: What the forward runs in.
        clip: Largest gradient norm; `math.inf` only measures.
        schedule: Shape of the rate.
        warmup: Updates of the warm-up.
        minimum: Last factor of the schedule.
        lr: Base rate.
        steps: Applied updates of the whole run.
        skip_nonfinite: Windows with a gradient that is not finite that are skipped in a row.
        save_every: Applied updates between two checkpoints.
        evaluate_every: Applied updates between two held-out losses.
        observe: Record everything that can be observed.
        parallel: How ranks share the model. No setting: it decides no weight but by rounding.

    Raises:
        ValueError: A number is out of range, or two options exclude each other.
    """

    seed: int | None = None
    size: int | None = None
    rows: int | None = None
    targets: int | None = None
    precision: PrecisionName | None = None
    clip: float | None = None
    schedule: ScheduleName | None = None
    warmup: int | None = None
    minimum: float | None = None
    lr: float | None = None
    steps: int | None = None
    skip_nonfinite: int | None = None
    save_every: int | None = None
    evaluate_every: int | None = None
    observe: bool | None = None
    parallel: ParallelName | None = None

    def __post_init__(self) -> None:
        for name in (
            "size", "rows", "targets", "steps", "skip_nonfinite", "save_every", "evaluate_every"
        ):  # fmt: skip
            self._check(name, "at least 1", lambda value: value >= 1)
        self._check("seed", "from 0 to 4294967295", lambda value: 0 <= value < 2**32)
        self._check("warmup", "0 or more", lambda value: value >= 0)
        self._check("minimum", "a ratio from 0 to 1", lambda value: 0 <= value <= 1)
        self._check("lr", "greater than 0 and finite", lambda value: 0 < value < math.inf)
        self._check("clip", "greater than 0, or `none`", lambda value: value > 0)
        ways = [f"`--{name}`" for name in ("size", "rows", "targets") if self._given(name)]
        if len(ways) > 1:
            raise ValueError(
                f"{' and '.join(ways)} exclude each other: each says in its own way which "
                "microbatches make one update. Give one."
            )
        self._check_schedule()

    def given(self) -> dict[str, Any]:
        """Give what was typed, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def over(self, saved: Mapping[str, Any]) -> Options:
        """Put these options over those a run was begun with.

        Args:
            saved: What `to_json` gave.
        """
        before = dict(saved)
        if any(self._given(name) for name in ("size", "rows", "targets")):
            before = {k: v for k, v in before.items() if k not in ("size", "rows", "targets")}
        if "clip" in before:
            before["clip"] = float(before["clip"])
        if "precision" in before:
            before["precision"] = PrecisionName(before["precision"])
        if "parallel" in before:
            before["parallel"] = ParallelName(before["parallel"])
        if "schedule" in before:
            before["schedule"] = ScheduleName(before["schedule"])
        return Options(**{**before, **self.given()})

    def to_json(self) -> dict[str, Any]:
        """Give what was typed as plain values."""
        values = {
            name: v.value if isinstance(v, enum.Enum) else v for name, v in self.given().items()
        }
        return {name: str(v) if v == math.inf else v for name, v in values.items()}

    def settings(self, recipe: Recipe) -> Settings:
        """Fill in from the recipe what was not typed. Imports torch.

        Args:
            recipe: Whose defaults hold.

        Raises:
            ValueError: The options do not fit each other or the recipe.
        """
        from ..nonfinite import Raise, Skip
        from ..recipes.settings import Settings

        if self.evaluate_every is not None and recipe.held_out is None:
            raise ValueError(
                "`--evaluate-every`: this recipe has no held-out batches. Give it some as "
                "`Recipe(held_out=...)`, or leave the option out."
            )
        own_way = any(self._given(name) for name in ("size", "rows", "targets"))
        ways = self if own_way else recipe
        steps = self.steps or recipe.steps
        often = max(1, math.ceil(steps / 10))
        return Settings(
            seed=self.seed if self.seed is not None else DEFAULT_SEED,
            size=ways.size,
            rows=ways.rows,
            targets=ways.targets,
            precision=self._precision(recipe),
            clip=self._clip(recipe),
            nonfinite=Raise() if self.skip_nonfinite is None else Skip(self.skip_nonfinite),
            schedule=self._schedule(recipe, steps),
            lr=self.lr if self.lr is not None else recipe.lr,
            steps=steps,
            save_every=self.save_every or often,
            evaluate_every=self.evaluate_every or often,
            observe=bool(self.observe),
        )

    def _precision(self, recipe: Recipe) -> Precision:
        from ..precision import BF16, FP16, FP32

        named: dict[PrecisionName, Callable[[], Precision]] = {
            PrecisionName.FP32: FP32,
            PrecisionName.BF16: BF16,
            PrecisionName.FP16: FP16,
        }
        return recipe.precision if self.precision is None else named[self.precision]()

    def _clip(self, recipe: Recipe) -> Rule | None:
        from ..clip.norm import ByGlobalNorm

        if self.clip is None:
            return recipe.clip
        return None if self.clip == math.inf else ByGlobalNorm(self.clip)

    def _schedule(self, recipe: Recipe, steps: int) -> Callable[[int], float] | None:
        from .. import schedules

        if self.schedule is None:
            return None if recipe.schedule is None else recipe.schedule(steps)
        warmup, minimum = self.warmup or 0, self.minimum or 0.0
        stable = max(0, steps - warmup - max(1, steps // DECAY_SHARE))
        makers: dict[ScheduleName, Callable[[], Callable[[int], float]]] = {
            ScheduleName.CONSTANT: lambda: schedules.constant(warmup=warmup),
            ScheduleName.LINEAR: lambda: schedules.linear(
                total=steps, warmup=warmup, minimum=minimum
            ),
            ScheduleName.COSINE: lambda: schedules.cosine(
                total=steps, warmup=warmup, minimum=minimum
            ),
            ScheduleName.WSD: lambda: schedules.warmup_stable_decay(
                total=steps, warmup=warmup, stable=stable, minimum=minimum
            ),
            ScheduleName.INVERSE_SQRT: lambda: schedules.inverse_sqrt(
                warmup=warmup, minimum=minimum
            ),
        }
        if self.schedule is not ScheduleName.CONSTANT and warmup >= steps:
            raise ValueError(
                f"`--warmup {warmup}` leaves none of {steps} updates for the `{self.schedule}` "
                "schedule after it. Shorten the warm-up, or raise `--steps`."
            )
        return makers[self.schedule]()

    def _check_schedule(self) -> None:
        for name in ("warmup", "minimum"):
            if self._given(name) and self.schedule is None:
                raise ValueError(
                    f"`--{name}` without `--schedule`: the recipe's own schedule takes none. Name "
                    "one, for example `--schedule cosine`."
                )
        if self.schedule is ScheduleName.CONSTANT and self.minimum is not None:
            raise ValueError(
                "`--minimum` with `--schedule constant`, which never falls. Leave it out, or name "
                "another schedule."
            )
        if self.schedule is ScheduleName.INVERSE_SQRT and not self.warmup:
            raise ValueError(
                "`--schedule inverse-sqrt` falls as fast as its warm-up is long, and there is "
                "none. Give `--warmup` in updates."
            )

    def _given(self, name: str) -> bool:
        return getattr(self, name) is not None

    def _check(self, name: str, allowed: str, is_allowed: Callable[[Any], bool]) -> None:
        value = getattr(self, name)
        if value is not None and not is_allowed(value):
            raise ValueError(f"`--{name.replace('_', '-')} {value}`: must be {allowed}.")
