"""Curves of many forms, each with the windows its own formula gives; 20 draws of noise each.

Rates are exponents here: -2 is 0.01. A fall is a logistic with its 10 and 90 % levels where they
are said to be; a rise starts half a decade before it has undone a quarter of the fall.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest

from midstep.range_test.bounds import CeilingKind, Outcome, find_bounds
from midstep.range_test.smoothing import Floats, LocalLine

DEPTH = 1.67
NUM_DRAWS = 20
Window = tuple[float, float]


def grid(num_points: int = 100) -> Floats:
    return np.linspace(-6, 1, num_points)


def fall(x: Floats, tenth: float, nine_tenths: float, depth: float = DEPTH) -> Floats:
    steepness = 2 * math.log(9) / (nine_tenths - tenth)
    return -depth / (1 + np.exp(-steepness * (x - (tenth + nine_tenths) / 2)))


def rise(x: Floats, at: float) -> Floats:
    return DEPTH / 4 * (np.maximum(x - at + 0.5, 0) / 0.5) ** 3


@dataclasses.dataclass(frozen=True)
class Family:
    """A form, and where its bounds are.

    Attributes:
        lower: Window of the lower bound.
        upper: Of the upper bound.
        ceiling: Of the ceiling; None where there is none to be seen.
        num_points: Length of the sweep.
        end: Points before the loss was no longer finite; None if it stayed finite.
    """

    lower: Window
    upper: Window
    ceiling: Window | None
    num_points: int = 100
    end: int | None = None


PLAIN = {"lower": (-3.57, -2.97), "upper": (-2.03, -1.43), "ceiling": (-0.75, -0.25)}
SHORT = {"lower": (-3.8, -2.8), "upper": (-2.2, -1.2), "ceiling": (-1.0, -0.2)}


def form(name: str, x: Floats) -> Floats:
    """The curve without noise."""
    plain = fall(x, -3.27, -1.73) + rise(x, -0.48)
    return {
        "it comes back to chance and stays": lambda: np.minimum(0.0, plain),
        "far below zero": lambda: plain - 100,
        "30 points": lambda: plain,
        "500 points": lambda: plain,
        "late, and no end in sight": lambda: fall(x, -0.8, 0.4),
        "late, and then a rise": lambda: fall(x, -1.5, -0.4) + rise(x, 0.5),
        "two falls with a bump between": lambda: (
            fall(x, -4.2, -3.4, 0.8)
            + fall(x, -2.2, -1.4, 1.0)
            + 0.25 * np.exp(-(((x + 2.9) / 0.25) ** 2))
            + rise(x, -0.2)
        ),
        "two falls with a flat part between": lambda: (
            fall(x, -5, -4.2, 0.8) + fall(x, -2, -1.2, 0.87) + rise(x, -0.2)
        ),
        "a long flat bottom": lambda: fall(x, -4.3, -3.0) + rise(x, 0.3),
        "nan out of nothing": lambda: fall(x, -3.8, -2.1),
        "nan in the middle of the fall": lambda: fall(x, -3.0, -1.0),
        "three points from fine to infinite": lambda: np.where(
            x < -0.71, fall(x, -3.27, -1.73), np.exp(8 + 40 * (x + 0.71))
        ),
        "a spike, and dead ever after": lambda: (
            np.where(x > -0.6, -0.3, fall(x, -3, -1)) + 3 * np.exp(-(((x + 0.6) / 0.05) ** 2))
        ),
        "dead without a spike": lambda: np.where(x > -0.6, -0.3, fall(x, -3, -1)),
        "an end soon after the fall": lambda: fall(x, -4, -3) + rise(x, -2.2),
        "from the first point on": lambda: -DEPTH * (1 - np.exp(-(x + 6))) + rise(x, -0.5),
    }[name]()


FAMILIES = {
    "it comes back to chance and stays": Family(**PLAIN),
    "far below zero": Family(**PLAIN),
    "30 points": Family(**SHORT, num_points=30),
    "500 points": Family(**PLAIN, num_points=500),
    "late, and no end in sight": Family((-1.1, -0.5), (0.1, 0.9), None),
    "late, and then a rise": Family((-1.8, -1.2), (-0.8, 0.25), (0.2, 0.75)),
    "two falls with a bump between": Family((-4.5, -3.9), (-1.8, -1.2), (-0.5, 0.1)),
    "two falls with a flat part between": Family((-5.3, -4.6), (-1.7, -1.0), (-0.5, 0.1)),
    "a long flat bottom": Family((-4.6, -4.0), (-3.3, -2.4), (0.0, 0.6)),
    "nan out of nothing": Family((-4.1, -3.5), (-2.5, -1.5), (-0.42, -0.41), end=80),
    "nan in the middle of the fall": Family((-3.6, -2.6), (-2.2, -1.69), (-1.41, -1.4), end=66),
    "three points from fine to infinite": Family(
        (-3.57, -2.97), (-2.03, -1.4), (-0.95, -0.7), end=78
    ),
    "a spike, and dead ever after": Family((-3.4, -2.6), (-1.6, -0.8), (-0.95, -0.5)),
    "dead without a spike": Family((-3.4, -2.6), (-1.6, -0.8), (-0.95, -0.4)),
    "an end soon after the fall": Family((-4.3, -3.6), (-3.3, -2.5), (-2.5, -1.9), end=60),
    "from the first point on": Family((-6.0, -5.3), (-4.4, -2.8), (-0.8, -0.1)),
}


def normal(random: np.random.Generator, num: int) -> Floats:
    return random.standard_normal(num)


def heavy(random: np.random.Generator, num: int) -> Floats:
    """Noise whose variance is not finite."""
    return np.clip(random.standard_t(2, num), -30, 30) / 1.5


@pytest.mark.parametrize("noise", [normal, heavy])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_bounds_are_where_the_formula_has_them(
    name: str, noise: Callable[[np.random.Generator, int], Floats]
) -> None:
    family, random = FAMILIES[name], np.random.default_rng(8)
    x = grid(family.num_points)[: family.end]
    line = LocalLine(len(x), max(3, round(0.06 * len(x))))
    curve = form(name, x)
    misses = {"lower": 0, "upper": 0, "ceiling": 0}
    for _ in range(NUM_DRAWS):
        drawn = curve + 0.03 * DEPTH * noise(random, len(x))
        found = find_bounds(10**x, drawn, is_broken=family.end is not None, line=line)
        assert found.outcome is Outcome.DESCENT
        for bound in misses:
            at, window = getattr(found, bound), getattr(family, bound)
            is_in = at is None if window is None else _is_in(x, at, window)
            misses[bound] += not is_in
    assert max(misses.values()) <= NUM_DRAWS // 10, misses


def _is_in(x: Floats, at: int | None, window: Window) -> bool:
    return at is not None and window[0] - 0.01 <= x[at] <= window[1] + 0.01


def remembering(random: np.random.Generator, num: int) -> Floats:
    values = np.zeros(num + 50)
    for i, fresh in enumerate(random.standard_normal(num + 49), 1):
        values[i] = 0.6 * values[i - 1] + fresh
    return values[50:]


@pytest.mark.parametrize("noise", [normal, heavy, remembering])
def test_a_flat_curve_has_no_number_and_what_only_rises_no_bounds(
    noise: Callable[[np.random.Generator, int], Floats],
) -> None:
    random, x = np.random.default_rng(9), grid()
    line = LocalLine(100, 6)
    seen = {"flat": 0, "numbers": 0, "rising": 0}
    for _ in range(100):
        drawn = noise(random, 100)
        flat = find_bounds(10**x, drawn, is_broken=False, line=line)
        seen["flat"] += flat.outcome is Outcome.NO_DESCENT
        seen["numbers"] += flat.ceiling is not None
        rising = find_bounds(10**x, drawn + 40 * rise(x, -0.5), is_broken=False, line=line)
        seen["rising"] += rising.outcome is Outcome.NO_DESCENT_THEN_DIVERGED
        assert rising.ceiling_kind in (CeilingKind.RISE, CeilingKind.CENSORED)
    assert seen["flat"] >= 94
    assert seen["numbers"] <= 6
    assert seen["rising"] >= 94
