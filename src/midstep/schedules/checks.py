"""What a schedule refuses when it is made, so that it cannot fail at step 4,000."""

import math
import operator
from collections.abc import Callable
from typing import SupportsIndex, TypeAlias

Shape: TypeAlias = Callable[[float], float]  # the share of a change that is done: 0 -> 0, 1 -> 1


def whole_number(name: str, value: SupportsIndex, *, at_least: int = 0) -> int:
    """Return a count as an int, or refuse it under the caller's name for it."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(
            f"`{name}={value!r}` is a `{type(value).__name__}`, but it is a count, which is "
            "whole. Pass an int."
        )
    number = operator.index(value)
    if number < at_least:
        raise ValueError(
            f"`{name}={number}` must be at least {at_least}, because it is a count and fewer "
            "make no sense here. Pass a larger int."
        )
    return number


def real_number(name: str, value: object, *, low: float = 0.0) -> None:
    """Refuse what is not a finite number from `low` up, nan included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"`{name}={value!r}` is a `{type(value).__name__}`, but a rate is computed with it. "
            "Pass a float."
        )
    if not (math.isfinite(value) and value >= low):
        raise ValueError(
            f"`{name}={value}` must be a finite number, {low:g} or more, because the rate would be "
            "nan, infinite or negative. Pass a number in that range."
        )


def ratio(name: str, value: float) -> None:
    """Refuse what is not a share of the base rate, from 0 to 1."""
    real_number(name, value)
    if value > 1:
        raise ValueError(
            f"`{name}={value}` must be from 0 to 1, because it is a ratio of the base rate and "
            "not a rate. For an absolute rate, divide it by the base rate."
        )


def positive(name: str, value: float) -> None:
    """Refuse what is not a finite number greater than 0."""
    real_number(name, value)
    if value == 0:
        raise ValueError(
            f"`{name}={value}` must be greater than 0, because the schedule divides by it. "
            "Pass a positive number."
        )


def horizon(
    *, total: SupportsIndex, warmup: SupportsIndex = 0, stable: SupportsIndex = 0
) -> tuple[int, int, int]:
    """Return `total`, `warmup` and `stable` as ints; `total` must leave updates to decay on."""
    warmup, stable = whole_number("warmup", warmup), whole_number("stable", stable)
    total = whole_number("total", total, at_least=1)
    if total <= warmup + stable:
        raise ValueError(
            f"`total={total}` must be greater than `warmup={warmup}` plus `stable={stable}`, "
            "because `total` counts all applied updates, the warm-up included, and none is left "
            "to decay on. Raise `total`, or shorten the others."
        )
    return total, warmup, stable


def shape_of_change(shape: Shape) -> None:
    """Refuse a shape that does not begin at 0 and end at 1."""
    if not callable(shape):
        raise TypeError(
            f"`shape={shape!r}` is a `{type(shape).__name__}`, but it is called with the share of "
            "the time that is over. Pass one of `midstep.schedules.shapes`, or a function."
        )
    ends = shape(0.0), shape(1.0)
    if not all(math.isclose(end, due, abs_tol=1e-9) for end, due in zip(ends, (0, 1), strict=True)):
        raise ValueError(
            f"`shape={shape!r}` goes from {ends[0]:g} to {ends[1]:g}, but it says which share of a "
            "change is done and must go from 0 to 1, or the rate jumps at both ends. For a decay "
            "written as what is left, pass one minus it."
        )
