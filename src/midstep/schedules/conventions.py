"""One wish, several conventions: what libraries make of the same warm-up, total and minimum."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from . import presets
from .schedule import Schedule
from .shapes import Linear, Sqrt
from .standard import constant, cosine, inverse_sqrt, linear, polynomial, warmup_stable_decay


class Family(StrEnum):
    """Schedules by what the rate does after its warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    POLYNOMIAL = "polynomial"
    INVERSE_SQRT = "inverse_sqrt"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What somebody wants of a schedule, in words that every library takes.

    Attributes:
        family: What the rate does after the warm-up.
        total: Updates of the run, warm-up included.
        warmup: Updates of the rise.
        stable: Updates at the peak; for `WARMUP_STABLE_DECAY`.
        minimum: Where it ends, as a share of the peak.
        power: Of `POLYNOMIAL`.

    Example:
        >>> wish = Wish(family=Family.COSINE, total=10, warmup=2)
        >>> [round(schedule(0), 2) for schedule in wish.conventions().values()][:3]
        [0.5, 0.0, 0.5]
    """

    family: Family
    total: int
    warmup: int = 0
    stable: int = 0
    minimum: float = 0.0
    power: float = 2.0

    def schedule(self) -> Schedule:
        """Give this library's own schedule: nothing at rate 0, the minimum on the last update.

        Raises:
            ValueError: The numbers do not fit each other.
        """
        total, warmup, minimum = self.total, self.warmup, self.minimum
        makers: Mapping[Family, Callable[[], Schedule]] = {
            Family.CONSTANT: lambda: constant(warmup=warmup),
            Family.LINEAR: lambda: linear(total=total, warmup=warmup, minimum=minimum),
            Family.COSINE: lambda: cosine(total=total, warmup=warmup, minimum=minimum),
            Family.POLYNOMIAL: lambda: polynomial(
                total=total, warmup=warmup, minimum=minimum, power=self.power
            ),
            Family.INVERSE_SQRT: lambda: inverse_sqrt(warmup=warmup, minimum=minimum),
            Family.WARMUP_STABLE_DECAY: lambda: warmup_stable_decay(
                total=total, warmup=warmup, stable=self.stable, minimum=minimum
            ),
        }
        return makers[self.family]()

    def conventions(self) -> dict[str, Schedule]:
        """Give the same wish as each library understands it, this one first, by its name."""
        return {"midstep": self.schedule(), **_PEERS[self.family](self)}


def _nobody(_: Wish) -> dict[str, Schedule]:
    return {}


def _cosines(wish: Wish) -> dict[str, Schedule]:
    total, warmup, minimum = wish.total, wish.warmup, wish.minimum
    return {
        "Transformers": presets.hf_cosine(total=total, warmup=warmup, minimum=minimum),
        "Transformers, warmup_with_min_lr": presets.hf_cosine_warmup_with_min_lr(
            total=total, warmup=warmup, minimum=minimum
        ),
        "torch": presets.torch_warmup_cosine(total=total, warmup=warmup, minimum=minimum),
        "timm": presets.timm_cosine(total=total, warmup=warmup, minimum=minimum),
        "timm, warmup_prefix": presets.timm_cosine(
            total=total, warmup=warmup, minimum=minimum, runs_in_warmup=False
        ),
        "optax": presets.optax_warmup_cosine(total=total, warmup=warmup, minimum=minimum),
        "nanoGPT": presets.nanogpt_cosine(total=total, warmup=warmup, minimum=minimum),
    }


def _lines(wish: Wish) -> dict[str, Schedule]:
    # The others end at 0 and take no minimum.
    return {"Transformers": presets.hf_linear(total=wish.total, warmup=wish.warmup)}


def _polynomials(wish: Wish) -> dict[str, Schedule]:
    found: dict[str, Schedule] = {
        "Transformers": presets.hf_polynomial(
            total=wish.total, warmup=wish.warmup, minimum=wish.minimum, power=wish.power
        )
    }
    if not wish.warmup:  # neither has one
        found["torch"] = presets.torch_polynomial(total=wish.total, power=wish.power)
        found["optax"] = presets.optax_polynomial(
            transition_steps=wish.total, minimum=wish.minimum, power=wish.power
        )
    return found


def _inverse_roots(wish: Wish) -> dict[str, Schedule]:
    return {"Transformers": presets.hf_inverse_sqrt(warmup=wish.warmup)}


def _plateaus(wish: Wish) -> dict[str, Schedule]:
    warmup, stable, minimum = wish.warmup, wish.stable, wish.minimum
    decay = wish.total - warmup - stable
    return {
        "Transformers": presets.hf_wsd(
            warmup=warmup, stable=stable, decay=decay, minimum=minimum, shape=Linear()
        ),
        "timm": presets.timm_wsd(
            warmup=warmup, stable=stable, decay=decay, minimum=minimum, shape=Sqrt()
        ),
        "torchtitan": presets.torchtitan_wsd(
            warmup=warmup, stable=stable, decay=decay, minimum=minimum
        ),
    }


_PEERS: Mapping[Family, Callable[[Wish], dict[str, Schedule]]] = {
    Family.CONSTANT: _nobody,
    Family.LINEAR: _lines,
    Family.COSINE: _cosines,
    Family.POLYNOMIAL: _polynomials,
    Family.INVERSE_SQRT: _inverse_roots,
    Family.WARMUP_STABLE_DECAY: _plateaus,
}
