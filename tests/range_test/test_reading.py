"""Readings of range-test curves, against windows that follow from the form of each curve."""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstep.range_test import CeilingKind, Confidence, Curve, Outcome, Reading, read_curves
from midstep.range_test.bounds import find_bounds
from midstep.range_test.smoothing import LocalLine

CURVES = Path(__file__).parents[1] / "data" / "curves"
EXPECTED = json.loads((CURVES / "expected.json").read_text())
LR = np.geomspace(1e-6, 10, 100)
FALL = 1.67


def curve_of(name: str) -> Curve:
    with (CURVES / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    return Curve([float(row["lr"]) for row in rows], [float(row["loss"]) for row in rows])


def valley(lr: np.ndarray) -> np.ndarray:
    """A fall with its 10 and 90 % levels at 10^-3.27 and 10^-1.73, and a rise."""
    x = np.log10(lr)
    fall = 2.3 - FALL / (1 + np.exp(-(x + 2.5) * 2.86))
    return fall + np.where(x > -1.0, FALL / 4 * (np.maximum(x + 1.0, 0) / 0.52) ** 3, 0)


def outcome_of(loss: np.ndarray) -> Outcome:
    lr = np.geomspace(1e-7, 1, len(loss))
    line = LocalLine(len(loss), max(3, round(0.06 * len(loss))))
    return find_bounds(lr, loss, is_broken=False, line=line).outcome


def correlated(rho: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    def noise(random: np.random.Generator, num_points: int) -> np.ndarray:
        fresh = random.standard_normal(num_points + 200)
        values = np.zeros(num_points + 200)
        for i in range(1, num_points + 200):
            values[i] = rho * values[i - 1] + fresh[i]
        return values[200:]

    return noise


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_bounds_of_known_curves_lie_in_their_windows(name: str) -> None:
    reading, expected = read_curves([curve_of(name)]), EXPECTED[name]
    status = "descent" if expected["status"] == "ok" else expected["status"]
    assert reading.outcome == status
    for bound in ("lower", "upper", "ceiling"):
        found = getattr(reading, bound)
        if expected[bound] is None:
            assert found is None
        else:
            low, high = expected[bound]
            assert low <= found.lr <= high
            assert found.low <= found.lr <= found.high


@pytest.mark.parametrize("rho", [0.0, 0.5], ids=["independent", "correlated"])
def test_pure_noise_gives_bounds_at_most_2_times_in_100(rho: float) -> None:
    random = np.random.default_rng(0)
    noise = correlated(rho)
    found = [outcome_of(2.3 + 0.05 * noise(random, 100)) for _ in range(1000)]
    assert found.count(Outcome.DESCENT) <= 20


def test_noise_of_a_fifth_of_the_fall_is_read_95_times_in_100_and_near_the_truth() -> None:
    random = np.random.default_rng(1)
    line = LocalLine(100, 6)
    found = [
        find_bounds(
            LR,
            valley(LR) + 0.2 * FALL * random.standard_normal(100),
            is_broken=False,
            line=line,
        )
        for _ in range(300)
    ]
    read = [indices for indices in found if indices.outcome is Outcome.DESCENT]
    assert len(read) >= 285
    for name, truth in (("lower", -3.27), ("upper", -1.73), ("ceiling", -0.48)):
        at = [getattr(indices, name) for indices in read]
        errors = [abs(math.log10(LR[i]) - truth) for i in at if i is not None]
        assert np.quantile(errors, 0.9) < 0.5


@given(
    shift=st.floats(-100, 100),
    scale=st.floats(1e-3, 1e3),
    faster=st.floats(1e-3, 1e3),
)
def test_a_reading_does_not_depend_on_the_units_of_loss_and_rate(
    shift: float, scale: float, faster: float
) -> None:
    noise = 0.01 * np.random.default_rng(2).standard_normal(100)
    loss = valley(LR) + noise
    line = LocalLine(100, 6)
    here = find_bounds(LR, loss, is_broken=False, line=line)
    there = find_bounds(LR * faster, shift + scale * loss, is_broken=False, line=line)
    for name in ("outcome", "lower", "steepest", "upper", "ceiling", "ceiling_kind"):
        assert getattr(here, name) == getattr(there, name)


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=12, max_size=60))
def test_any_curve_has_an_answer_and_its_bounds_are_in_order(losses: list[float]) -> None:
    reading = read_curves([Curve(np.geomspace(1e-6, 1, len(losses)).tolist(), losses)])
    if reading.outcome is not Outcome.DESCENT:
        assert reading.lower is reading.steepest is reading.upper is None
        assert reading.confidence is Confidence.NONE
        return
    assert reading.lower is not None
    assert reading.steepest is not None
    assert reading.upper is not None
    assert reading.lower.lr <= reading.steepest.lr <= reading.upper.lr
    if reading.ceiling is not None:
        assert reading.upper.lr <= max(reading.ceiling.lr / 2, 1e-6) * (1 + 1e-12)


def test_what_breaks_or_rises_at_once_is_named_with_its_ceiling() -> None:
    flat = 2.0 + 0.01 * np.random.default_rng(3).standard_normal(100)
    rising = flat + np.where(np.arange(100) > 8, (np.arange(100) - 8.0) ** 2, 0)
    reading = read_curves([Curve(LR, rising)])
    assert reading.outcome is Outcome.DIVERGED_FROM_START
    assert reading.ceiling is not None
    assert reading.ceiling.lr <= LR[12]
    broken = read_curves([Curve(LR[:51], [*flat[:50], math.nan])])
    assert broken.outcome is Outcome.NO_DESCENT_THEN_DIVERGED
    assert broken.ceiling_kind is CeilingKind.NONFINITE
    assert broken.ceiling is not None
    assert broken.ceiling.lr == LR[49]
    assert read_curves([Curve(LR[:8], flat[:8])]).outcome is Outcome.TOO_SHORT


def test_of_several_curves_each_bound_is_the_median() -> None:
    noise = np.random.default_rng(4).standard_normal((3, 100)) * 0.01
    curves = [Curve(LR * f, valley(LR) + n) for f, n in zip((1, 2, 8), noise, strict=True)]
    joined = read_curves(curves)
    alone = read_curves([curves[1]])
    assert joined.num_curves == 3
    for name in ("lower", "upper", "ceiling"):
        found, middle = getattr(joined, name), getattr(alone, name)
        assert found.lr == pytest.approx(middle.lr, rel=0.2)
        assert found.low < middle.lr / 1.5
        assert found.high > middle.lr * 3


def test_most_curves_decide_whether_there_are_bounds() -> None:
    flat = 2.0 + 0.01 * np.random.default_rng(5).standard_normal(100)
    falling, level = Curve(LR, valley(LR)), Curve(LR, flat)
    assert read_curves([falling, level, level]).outcome is Outcome.NO_DESCENT
    two_of_three = read_curves([falling, falling, level])
    assert two_of_three.outcome is Outcome.DESCENT
    assert two_of_three.confidence is not Confidence.HIGH


def test_a_reading_is_readable_and_its_json_strict() -> None:
    reading = read_curves([curve_of("5_nan_tail")])
    assert "80 % within" in str(reading)
    assert "the true ceiling may be lower" in str(reading)
    values = json.loads(reading.to_json())
    assert values["ceiling_kind"] == "nonfinite"
    assert values["upper"]["low"] <= values["upper"]["lr"] <= values["upper"]["high"]
    assert "no bounds" in str(Reading(outcome=Outcome.NO_DESCENT))


def test_rates_that_do_not_rise_are_refused() -> None:
    with pytest.raises(ValueError, match="rise from point to point"):
        Curve([1e-3, 1e-3], [1.0, 1.0])
    with pytest.raises(ValueError, match="2 rates and 1 losses"):
        Curve([1e-3, 1e-2], [1.0])


def test_what_falls_once_more_after_a_blow_up_is_not_the_minimum() -> None:
    x = np.linspace(0, 1, 90)
    first = np.interp(x, [0, 0.5, 0.65, 0.72, 0.78], [9.0, 8.5, 1.0, 18.0, 2.0])
    loss = np.where(x > 0.8, 0.5 + 400 * (x - 0.8) ** 2, first)
    loss += 0.3 * np.random.default_rng(6).standard_normal(90)
    lr = np.geomspace(1e-6, 10, 90)
    reading = read_curves([Curve(lr, loss)])
    assert reading.outcome is Outcome.DESCENT
    assert reading.ceiling is not None
    assert reading.ceiling.lr < lr[62]


def test_a_bump_on_the_way_down_is_not_a_blow_up() -> None:
    bump = 0.7 * np.exp(-(((np.log10(LR) + 2.2) / 0.25) ** 2))
    noise = 0.02 * np.random.default_rng(7).standard_normal(100)
    reading = read_curves([Curve(LR, valley(LR) + bump + noise)])
    assert reading.ceiling is not None
    assert 0.17 < reading.ceiling.lr < 0.57
