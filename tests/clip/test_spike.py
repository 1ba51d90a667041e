"""Skipping spikes: robust limits, nothing remembered of what was skipped, and an end to it."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
from norm_streams import of_norm, run

from midstep.clip import Attempt, Decision, SkipSpike
from midstep.errors import MidstepError
from midstep.gradients import Gradients


def steady(num: int, seed: int = 0) -> list[float]:
    return [float(x) for x in np.random.default_rng(seed).normal(1.0, 0.05, size=num)]


def hold(rule: SkipSpike, norm: float, loss: float | None = None, skipped: int = 0) -> Decision:
    return rule.decide(
        Gradients([of_norm(norm)]), Attempt(step=0, loss_mean=loss, skipped_in_a_row=skipped)
    )


def feed(rule: SkipSpike, norms: Iterable[float], losses: Iterable[float]) -> None:
    for norm, loss in zip(norms, losses, strict=True):
        rule.commit(hold(rule, norm, loss))


def test_the_limit_is_the_median_and_so_many_deviations() -> None:
    norms = steady(100)
    median = np.median(norms)
    limit = median + 6.0 * 1.4826 * np.median(np.abs(norms - median))
    rule = SkipSpike(sigma=6.0, window=128)
    run(rule, norms)
    assert hold(rule, 1.0).threshold == pytest.approx(limit, rel=1e-12)
    assert not hold(rule, limit * (1 - 1e-9)).skip
    assert hold(rule, limit * (1 + 1e-9)).skip


def test_a_spike_in_the_norm_or_in_the_loss_is_skipped() -> None:
    rule = SkipSpike()
    feed(rule, steady(128), [2.0 + x for x in steady(128, seed=1)])
    assert not hold(rule, 1.0, 3.0).skip
    assert hold(rule, 10.0, 3.0).skip
    assert hold(rule, 1.0, 10.0).skip
    assert not hold(rule, 0.0, -5.0).skip  # a fall is no spike


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_a_spike_and_is_not_remembered(loss: float) -> None:
    rule = SkipSpike(window=8)
    feed(rule, [1.0], [loss])  # nothing is judged yet
    assert rule.state_dict() == {"norms": [1.0], "losses": []}
    feed(rule, [1.0] * 4, [2.0] * 4)
    assert hold(rule, 1.0, loss).skip
    assert not hold(rule, 1.0, 2.0).skip


def test_nothing_is_skipped_before_half_a_window_was_seen() -> None:
    rule = SkipSpike(window=10)
    decisions = run(rule, [1.0, 50.0, 1.0, 1.0, 50.0, 50.0])
    assert [d.skip for d in decisions] == [False] * 5 + [True]
    assert decisions[4].threshold is None


def test_a_skipped_spike_is_not_remembered_so_the_second_is_seen_like_the_first() -> None:
    rule = SkipSpike(window=16)
    run(rule, steady(16))
    before = rule.state_dict()
    assert all(d.skip for d in run(rule, [30.0] * 50))
    assert rule.state_dict() == before


def test_spikes_inside_the_window_hardly_move_the_limit() -> None:
    # With mean and deviation one value of 1000 lifts the limit to some 600 (8 + 6 * 89).
    clean, spiked = SkipSpike(), SkipSpike()
    run(clean, steady(128))
    run(spiked, [*steady(60), 1000.0, *steady(67, seed=1)])
    limits = [hold(rule, 1.0).threshold for rule in (clean, spiked)]
    assert limits[1] is not None
    assert limits[1] == pytest.approx(limits[0], rel=0.1)


def test_it_changes_no_gradient() -> None:
    rule = SkipSpike(window=4)
    run(rule, [1.0, 1.1, 1.0, 1.2])
    gradients = Gradients([of_norm(50.0)])
    decision = rule.decide(gradients, Attempt(step=0))
    assert decision.skip
    assert (decision.clipped, decision.coefficient, gradients.factor) == (False, 1.0, 1.0)


def test_a_history_without_spread_does_not_make_the_next_digit_a_spike() -> None:
    rule = SkipSpike(window=8)
    feed(rule, [1.0] * 8, [2.0] * 8)
    assert not hold(rule, 1.05, 2.1).skip
    assert hold(rule, 1.07, 2.1).skip
    assert hold(rule, 1.05, 2.13).skip


def test_a_history_of_zeros_says_nothing() -> None:
    rule = SkipSpike(window=8)
    run(rule, [0.0] * 8)
    assert not hold(rule, 5.0).skip


def test_negative_losses_have_a_limit_above_their_median() -> None:
    rule = SkipSpike(window=8)
    feed(rule, [1.0] * 8, [-3.0, -3.1, -2.9, -3.0, -3.2, -2.8, -3.0, -3.1])
    assert not hold(rule, 1.0, -2.7).skip
    assert hold(rule, 1.0, 0.0).skip


def test_a_window_without_losses_is_judged_by_its_norms() -> None:
    rule = SkipSpike(window=4)
    run(rule, [1.0] * 4)
    assert hold(rule, 9.0, None).skip
    assert not hold(rule, 1.0, 1e9).skip  # no loss was seen before


def test_so_many_skips_in_a_row_are_an_error_with_its_numbers() -> None:
    rule = SkipSpike(window=4, max_consecutive=3)
    run(rule, [1.0] * 4)
    for skipped in range(3):
        assert hold(rule, 9.0, 2.0, skipped=skipped).skip
    state = rule.state_dict()
    with pytest.raises(
        MidstepError, match=r"3 updates in a row .* norm `9` \(limit `1\.06`\), loss"
    ):
        hold(rule, 9.0, 2.0, skipped=3)
    assert rule.state_dict() == state
    assert not hold(rule, 1.0, 2.0, skipped=3).skip  # no spike, no error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sigma": 0.0}, "`SkipSpike(sigma=0.0)`: must be greater than 0"),
        ({"sigma": math.nan}, "`SkipSpike(sigma=nan)`"),
        ({"window": 3}, "`SkipSpike(window=3)`: must be at least 4"),
        ({"max_consecutive": 0}, "`SkipSpike(max_consecutive=0)`: must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the whole message is compared
        SkipSpike(**arguments)  # type: ignore[arg-type]
    assert message in str(raised.value)
