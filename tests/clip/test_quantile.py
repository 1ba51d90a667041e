"""Clipping at a quantile: of the norms before, as they were before clipping."""

import math

import numpy as np
import pytest
from clipping import VECTORS
from norm_streams import clipped_norms, run

from midstep.clip import ByQuantile
from midstep.clip.quantile import quantile


def test_the_quantile_of_the_norms_so_far_is_that_of_autoclip() -> None:
    case = VECTORS["autoclip.p10"]
    rule = ByQuantile(q=0.1, warmup=1, cap=math.inf)
    thresholds = [d.threshold for d in run(rule, [*case["inputs"]["norms"], 1.0])]
    # AutoClip counts the norm itself; here it counts from the next update on.
    assert thresholds[0] == math.inf
    assert thresholds[1:] == pytest.approx(case["expected"]["thresholds"], rel=1e-12)


@pytest.mark.parametrize("q", [0.001, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("num", [1, 2, 3, 10, 1_000])
def test_a_quantile_is_that_of_numpy(q: float, num: int) -> None:
    values = np.random.default_rng(num).lognormal(size=num)
    assert quantile(list(values), q) == pytest.approx(np.quantile(values, q), rel=1e-12)


def test_an_update_is_held_against_the_norms_before_it() -> None:
    decisions = run(ByQuantile(q=0.5, warmup=3, cap=100.0), [1.0, 2.0, 3.0, 10.0, 10.0])
    assert [d.threshold for d in decisions] == [100.0, 100.0, 100.0, 2.0, 2.5]
    assert [d.clipped for d in decisions] == [False, False, False, True, True]


def test_the_share_that_passes_is_the_one_asked_for() -> None:
    norms = np.random.default_rng(0).lognormal(size=4_000)
    decisions = run(ByQuantile(q=0.8, cap=math.inf), norms)
    assert np.mean([not d.clipped for d in decisions[1_000:]]) == pytest.approx(0.8, abs=0.02)


def test_remembered_norms_are_the_unclipped_ones_so_it_follows_a_rise() -> None:
    rule = ByQuantile(q=0.9, window=50, warmup=10, cap=math.inf)
    assert clipped_norms(rule, [1.0] * 60 + [2.0] * 60)[-1] == 2.0


def test_only_the_latest_norms_count() -> None:
    rule = ByQuantile(q=0.9, window=4, warmup=4, cap=math.inf)
    assert run(rule, [100.0] * 4 + [1.0] * 4 + [3.0])[-1].threshold == 1.0
    assert rule.state_dict() == {"norms": [1.0, 1.0, 1.0, 3.0]}


@pytest.mark.parametrize("norms", [[50.0], [2.0] * 60 + [50.0]])
def test_the_cap_holds_at_every_step(norms: list[float]) -> None:
    assert clipped_norms(ByQuantile(cap=1.5), norms)[-1] == pytest.approx(1.5)


def test_the_cap_may_follow_a_schedule() -> None:
    rule = ByQuantile(cap=lambda step: 1.0 + step)
    assert run(rule, [10.0], step=3)[0].threshold == 4.0


def test_norms_of_zero_do_not_erase_the_first_that_is_not() -> None:
    rule = ByQuantile(q=0.5, warmup=2, cap=10.0)
    assert clipped_norms(rule, [0.0] * 20 + [3.0])[-1] == 3.0


def test_a_smaller_window_takes_the_latest_norms_of_a_larger_one() -> None:
    large, small = ByQuantile(window=100, warmup=5), ByQuantile(window=5, warmup=5)
    run(large, [float(n) for n in range(20)])
    small.load_state_dict(large.state_dict())
    assert small.state_dict() == {"norms": [15.0, 16.0, 17.0, 18.0, 19.0]}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": 0.0}, ValueError, "`ByQuantile(q=0.0)`: must be greater than 0 and less than 1"),
        ({"q": 1.0}, ValueError, "`ByQuantile(q=1.0)`"),
        ({"q": math.nan}, ValueError, "`ByQuantile(q=nan)`"),
        ({"q": "0.9"}, TypeError, "`ByQuantile(q='0.9')`: must be a number"),
        ({"q": True}, TypeError, "`ByQuantile(q=True)`: must be a number"),
        ({"window": 0}, ValueError, "`ByQuantile(window=0)`: must be at least 1"),
        ({"window": 2.0}, TypeError, "`ByQuantile(window=2.0)`: must be a whole number"),
        ({"warmup": 0}, ValueError, "`ByQuantile(warmup=0)`: must be at least 1"),
        ({"window": 10, "warmup": 11}, ValueError, "`ByQuantile(window=10, warmup=11)`"),
        ({"cap": 0.0}, ValueError, "`ByQuantile(cap=0.0)`: must be greater than 0"),
        ({"cap": None}, TypeError, "`ByQuantile(cap=None)`: must be a number"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: dict[str, float], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        ByQuantile(**arguments)  # type: ignore[arg-type]
    assert message in str(raised.value)
