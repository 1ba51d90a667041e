"""What is said of differences, against figures worked out by hand."""

import math

import pytest

from midstep.comparing.cell import Guard
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
    assert half == pytest.approx(4.303 * 0.02 / math.sqrt(3))
    assert "b: +0.1000 +- 0.0497, larger than the spread" in "\n".join(comparison.lines())


def test_what_is_within_the_spread_or_of_one_seed_is_not_called_a_difference() -> None:
    noisy = Comparison((row("a", 1.0, 2.0, 3.0), row("b", 1.9, 1.5, 3.2)))
    assert "within the spread" in "\n".join(noisy.lines())
    single = Comparison((row("a", 1.0), row("b", 2.0)))
    assert single.differences() == [("b", 1.0, None)]
    assert "may be chance" in "\n".join(single.lines())


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
