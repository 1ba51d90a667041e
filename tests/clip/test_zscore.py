"""Clipping by z-score: the linear rule, and a way out of its own limit."""

import math

import pytest
from clipping import VECTORS
from norm_streams import clipped_norms, level_shift, run

from midstep.clip import ByZScore


def test_norms_and_moments_are_those_of_the_linear_rule() -> None:
    case = VECTORS["zclip.nocap.percentile"]
    params, expected = case["params"], case["expected"]
    rule = ByZScore(
        z=params["z_thresh"],
        beta=params["alpha"],
        warmup=params["warmup_steps"],
        cap=math.inf,
        patience=100,
    )
    for index, norm in enumerate(case["inputs"]["norms"]):
        (clipped,) = clipped_norms(rule, [norm])
        # Where ZClip clips, it divides by the norm plus 1e-6, on purpose not done here.
        epsilon = 1e-6 if expected["spike"][index] else 0.0
        theirs = expected["clipped_norms"][index] * (norm + epsilon) / norm
        assert clipped == pytest.approx(theirs, rel=1e-9)
        state = rule.state_dict()
        if expected["mean"][index] is None:
            assert state["mean"] is None
        else:
            assert state["mean"] == pytest.approx(expected["mean"][index], rel=1e-9)
            assert state["variance"] == pytest.approx(expected["var"][index], rel=1e-9)


def test_a_lasting_rise_is_followed_as_by_the_linear_rule_where_patience_never_ends() -> None:
    expected = VECTORS["zclip.level_shift.percentile"]["expected"]
    rule = ByZScore(cap=math.inf, patience=10_000)
    decisions = run(rule, level_shift())
    assert sum(d.clipped for d in decisions[-100:]) == expected["clipped_in_last_100"]
    state = rule.state_dict()
    assert state["mean"] == pytest.approx(expected["final_mean"], rel=1e-9)
    assert state["variance"] == pytest.approx(expected["final_var"], rel=1e-9)


def test_a_lasting_rise_is_clipped_for_a_while_and_not_for_ever() -> None:
    # The default rule of ZClip clips every update from here on.
    assert VECTORS["zclip.level_shift.zscore"]["expected"]["clipped_in_last_100"] == 100
    decisions = run(ByZScore(cap=math.inf), level_shift())
    assert all(d.clipped for d in decisions[40:50])
    assert not any(d.clipped for d in decisions[-100:])


def test_a_rise_too_steep_for_the_running_moments_is_followed_after_patience_updates() -> None:
    # No spread at all: what is let pass teaches the moments nothing.
    norms = [1.0] * 25 + [2.0] * 30
    stuck = run(ByZScore(cap=math.inf, patience=10_000), norms)
    assert all(d.clipped for d in stuck[25:])
    freed = run(ByZScore(cap=math.inf, patience=20), norms)
    assert [d.clipped for d in freed[25:]] == [True] * 20 + [False] * 10


def test_spikes_that_are_not_in_a_row_never_move_the_level() -> None:
    rule = ByZScore(cap=math.inf, patience=5)
    run(rule, [1.0, 1.2, 0.8] * 10)
    for _ in range(10):
        decisions = run(rule, [50.0] * 4 + [1.0])
        assert [d.clipped for d in decisions] == [True] * 4 + [False]
    assert rule.state_dict()["mean"] < 5.0


def test_the_moments_start_again_from_the_raw_norms() -> None:
    rule = ByZScore(warmup=2, cap=1.0, patience=3)
    run(rule, [1.0, 1.0, 10.0, 20.0])
    assert rule.state_dict()["rising"] == [10.0, 20.0]
    run(rule, [30.0])
    assert rule.state_dict() == {
        "warming": [],
        "mean": 20.0,
        "variance": pytest.approx(200 / 3),
        "rising": [],
    }


@pytest.mark.parametrize("norms", [[50.0], [2.0, 2.5, 1.5] * 20 + [50.0]])
def test_the_cap_holds_at_every_step_and_does_not_enter_the_moments(norms: list[float]) -> None:
    rule = ByZScore(cap=1.25)
    assert clipped_norms(rule, norms)[-1] == pytest.approx(1.25)
    if len(norms) > 25:
        assert rule.state_dict()["mean"] > 1.9


def test_the_cap_may_follow_a_schedule() -> None:
    assert run(ByZScore(cap=lambda step: 1.0 + step), [10.0], step=3)[0].threshold == 4.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"z": 0.0}, "`ByZScore(z=0.0)`: must be greater than 0"),
        ({"beta": 1.0}, "`ByZScore(beta=1.0)`: must be greater than 0 and less than 1"),
        ({"beta": 0.0}, "`ByZScore(beta=0.0)`"),
        ({"warmup": 1}, "`ByZScore(warmup=1)`: must be at least 2"),
        ({"patience": 1}, "`ByZScore(patience=1)`: must be at least 2"),
        ({"cap": -1.0}, "`ByZScore(cap=-1.0)`: must be greater than 0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the whole message is compared
        ByZScore(**arguments)  # type: ignore[arg-type]
    assert message in str(raised.value)
