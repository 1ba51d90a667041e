"""What is said of differences, against figures worked out by hand."""

import dataclasses
import math
import random

import pytest

from midstep.comparing.cell import Guard
from midstep.comparing.chance import student
from midstep.comparing.outcome import Comparison, Row
from midstep.records import UpdateRecord, Verdict


def row(variant: str, *held_out: float) -> Row:
    return Row(
        variant=variant,
        held_out=held_out,
        num_lost=sum(not math.isfinite(loss) for loss in held_out),
        targets=100.0,
        clipped=0.25,
        norms=(1.0, 2.0, 3.0),
        mean_coefficient=0.9,
        least_coefficient=0.5,
        update_norm=None,
        num_skipped=0,
        seconds=1.0,
    )


def test_a_difference_is_taken_within_seeds() -> None:
    # Losses differ by 1 between seeds, the variants by 0.1 within each: t(2) = 4.303.
    comparison = Comparison((row("a", 1.0, 2.0, 3.0), row("b", 1.1, 2.12, 3.08)))
    ((name, mean, half),) = comparison.differences()
    assert name == "b"
    assert mean == pytest.approx(0.1)
    assert half == pytest.approx(4.303 * 0.02 / math.sqrt(3), rel=2e-4)
    assert "b: +0.1000 +- 0.0497, larger than the spread" in "\n".join(comparison.lines())


def test_what_is_within_the_spread_or_of_one_seed_is_not_called_a_difference() -> None:
    noisy = Comparison((row("a", 1.0, 2.0, 3.0), row("b", 1.9, 1.5, 3.2)))
    assert "within the spread" in "\n".join(noisy.lines())
    single = Comparison((row("a", 1.0), row("b", 2.0)))
    assert single.differences() == [("b", 1.0, None)]
    assert "may be chance" in "\n".join(single.lines())


# Two-sided quantiles of Student's t as tables print them: probability outside, degrees, number.
TABLE = [
    (0.05, 1, 12.706),
    (0.05, 2, 4.303),
    (0.01, 4, 4.604),
    (0.05, 9, 2.262),
    (0.01, 10, 3.169),
    (0.001, 3, 12.924),
    (0.05, 30, 2.042),
]


@pytest.mark.parametrize(("outside", "degrees", "number"), TABLE)
def test_the_quantiles_are_those_of_the_tables(outside: float, degrees: int, number: float) -> None:
    assert student(outside, degrees) == pytest.approx(number, abs=6e-4)


@pytest.mark.parametrize("num_variants", [2, 5, 8])
def test_of_equal_variants_one_is_called_different_at_most_5_times_in_100(
    num_variants: int,
) -> None:
    draws = random.Random(0)
    wrong = 0
    for _ in range(400):
        rows = [row(f"{v}", *(draws.gauss(0, 1) for _ in range(3))) for v in range(num_variants)]
        rows.sort(key=lambda row: row.mean)
        found = Comparison(tuple(rows)).differences()
        wrong += any(abs(mean) > half for _, mean, half in found if half is not None)
    assert wrong <= 20 + 9  # 2 standard deviations of 400 draws


def test_how_many_were_compared_and_on_how_much_is_said() -> None:
    three = [row("a", 1.0, 1.1, 1.2), row("b", 1.3, 1.2, 1.25), row("c", 1.4, 1.5, 1.6)]
    words = " ".join(Comparison(tuple(three)).lines())
    assert "3 pairs of 3 variants" in words
    assert "Each was trained on 100 targets." in words
    unequal = dataclasses.replace(three[1], targets=150.0)
    assert "not the same budget" in " ".join(Comparison((three[0], unequal)).lines())


def test_a_lost_run_makes_its_variant_lost() -> None:
    comparison = Comparison((row("a", 1.0, 2.0), row("b", math.inf, 0.5)))
    assert "b: lost" in "\n".join(comparison.lines())
    assert '"inf"' in comparison.to_json()


def record(loss: float, step: int) -> UpdateRecord:
    return UpdateRecord(
        update=step,
        step=step,
        verdict=Verdict.APPLIED,
        num_microbatches=1,
        denominators={"loss": 1},
        loss_means={"loss": loss},
        loss_mean=loss,
        grad_norm=1.0,
        clip_coefficient=1.0,
        clipped=False,
        lr=[0.1],
        loss_scale=1.0,
        num_nonfinite=0,
        seconds=0.1,
    )


@pytest.mark.parametrize("shift", [0.0, -50.0])
def test_the_guard_stops_a_blow_up_and_nothing_else(shift: float) -> None:
    guard = Guard()
    losses = [2.3 * math.exp(-step / 40) + 0.1 * (-1) ** step for step in range(200)]
    for step, loss in enumerate([*losses, 9.0, *losses[-20:]]):  # one spike is no blow-up
        guard.on_update(record(loss + shift, step))
        assert not guard()
    for step in range(40):
        guard.on_update(record(shift + 100.0 * step, 300 + step))
    assert guard()
