"""Schedules made of schedules: end to end, scaled, or with an end that is enforced."""

from bisect import bisect_right
from dataclasses import dataclass

from .checks import real_number, whole_number
from .schedule import Factor, Schedule


def _must_be_callable(name: str, value: object) -> None:
    if not callable(value):
        raise TypeError(
            f"`{name}={value!r}` is a `{type(value).__name__}`, but it is called with a step to "
            "get a factor. Pass a schedule, or a function of the step."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(Schedule):
    """Use one schedule after another, each on its own clock from the step where it begins.

        f(s) = parts[i](s - at[i - 1])  for  at[i - 1] <= s < at[i]

    Nothing is carried over from one part to the next, so the joint is where it is said to be, no
    step is computed twice, and a later part needs no run through an earlier one.

    Args:
        parts: The schedules in order; any function of the step will do.
        at: The steps on which the second, third, ... begin. They must not fall. A part that begins
            where the next one does is never used, so a phase of 0 updates needs no special case.

    Example:
        >>> from midstep.schedules import Constant, cosine
        >>> cooled = Joined(parts=(Constant(factor=0.5), cosine(total=4)), at=(2,))
        >>> [round(cooled(step), 3) for step in range(7)]
        [0.5, 0.5, 0.854, 0.5, 0.146, 0.0, 0.0]
    """

    parts: tuple[Factor, ...]
    at: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        object.__setattr__(self, "at", tuple(self.at))
        for part in self.parts:
            _must_be_callable("parts", part)
        for step in self.at:
            whole_number("at", step)
        if len(self.parts) != len(self.at) + 1:
            raise ValueError(
                f"`Joined` has {len(self.parts)} `parts` and {len(self.at)} steps in `at`, which "
                "says where each part but the first begins. Give one step fewer than parts."
            )
        if list(self.at) != sorted(self.at):
            raise ValueError(
                f"`Joined(at={self.at})` must not fall, because the parts follow each other. Put "
                "the steps in order; they count from step 0 of the whole."
            )

    def _factor(self, step: int) -> float:
        index = bisect_right(self.at, step)
        return self.parts[index](step - self.at[index - 1] if index else step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled(Schedule):
    """Multiply a schedule by a number, for another peak or another quantity than a rate.

        f(s) = by * schedule(s)

    Args:
        schedule: Any function of the step.
        by: The number, 0 or more.

    Example:
        >>> from midstep.schedules import linear
        >>> max_norm = Scaled(schedule=linear(total=10, minimum=0.5), by=2.0)
        >>> max_norm(9)
        1.0
    """

    schedule: Factor
    by: float

    def __post_init__(self) -> None:
        _must_be_callable("schedule", self.schedule)
        real_number("by", self.by)

    def _factor(self, step: int) -> float:
        return self.by * self.schedule(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded(Schedule):
    """Refuse to run past the end, where a schedule would otherwise hold or run on.

    A scheduler ticks after the last update too, so `total` itself is still answered, although no
    update uses the value.

    Args:
        schedule: Any function of the step.
        total: Applied updates that were planned, warm-up included.

    Raises:
        ValueError: (when called) The step is past `total`.

    Example:
        >>> from midstep.schedules import linear
        >>> Bounded(schedule=linear(total=4), total=4)(4)
        0.0
    """

    schedule: Factor
    total: int

    def __post_init__(self) -> None:
        _must_be_callable("schedule", self.schedule)
        whole_number("total", self.total, at_least=1)

    def _factor(self, step: int) -> float:
        if step > self.total:
            raise ValueError(
                f"`step={step}` is past `total={self.total}`, for which this schedule was made: "
                "it has no rate to go on with. Stop there, or plan for more; `total` counts "
                "applied updates, not batches or epochs."
            )
        return self.schedule(step)
