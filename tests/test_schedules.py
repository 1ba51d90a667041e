"""Schedules in the convention of the package: their law, their edges, and what they refuse."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from midstep import schedules
from midstep.schedules import (
    Bounded,
    Constant,
    Curve,
    Factor,
    Joined,
    Leg,
    Scaled,
    Schedule,
    Shape,
    WarmRestarts,
    constant,
    cosine,
    inverse_sqrt,
    linear,
    polynomial,
    presets,
    shapes,
    updates_per_epoch,
    warmup_stable_decay,
    with_warmup,
)

# What is left of a decay after the share `q` of it, as papers write it: the oracle of the shapes.
LEFT: dict[Shape, Callable[[float], float]] = {
    shapes.Linear(): lambda q: 1 - q,
    shapes.Cosine(): lambda q: (1 + math.cos(math.pi * q)) / 2,
    shapes.Sqrt(): lambda q: 1 - math.sqrt(q),
    shapes.Exponential(): lambda q: 2 * 0.5**q - 1,
    shapes.Power(power=2): lambda q: (1 - q) ** 2,
    shapes.Power(power=0.5): lambda q: math.sqrt(1 - q),
}
# How far each shape goes at most in the share `h` of its time.
STRIDE: dict[Shape, Callable[[float], float]] = {
    shapes.Linear(): lambda h: h,
    shapes.Cosine(): lambda h: math.pi / 2 * h,
    shapes.Sqrt(): math.sqrt,
    shapes.Exponential(): lambda h: 2 * math.log(2) * h,
    shapes.Power(power=2): lambda h: 2 * h,
    shapes.Power(power=0.5): math.sqrt,
}
ROUNDING = 1e-15


class Plan(NamedTuple):
    warmup: int
    stable: int
    decay: int
    minimum: float
    shape: Shape

    @property
    def total(self) -> int:
        return self.warmup + self.stable + self.decay

    def schedule(self) -> Curve:
        return warmup_stable_decay(
            total=self.total,
            warmup=self.warmup,
            stable=self.stable,
            minimum=self.minimum,
            shape=self.shape,
        )


PLANS = st.builds(
    Plan,
    warmup=st.integers(0, 40),
    stable=st.integers(0, 40),
    decay=st.integers(1, 100),
    minimum=st.floats(0.0, 0.95),
    shape=st.sampled_from(list(LEFT)),
)

EVERY_KIND: list[Schedule] = [
    constant(),
    constant(warmup=3),
    linear(total=12, warmup=4),
    cosine(total=12, warmup=4, minimum=0.1),
    polynomial(total=12, power=1.5),
    inverse_sqrt(warmup=4),
    inverse_sqrt(timescale=100.0, minimum=0.2),
    warmup_stable_decay(total=12, warmup=4, stable=3, shape=shapes.Exponential()),
    with_warmup(WarmRestarts(first=3, growth=2), warmup=5),
    Joined(parts=(Constant(factor=0.5), linear(total=5)), at=(3,)),
    Scaled(schedule=cosine(total=9), by=2.0),
    Bounded(schedule=cosine(total=12), total=12),
    presets.torch_one_cycle(total=12),
    presets.noam(width=64, warmup=4),
]


def factors(schedule: Factor, num_updates: int) -> list[float]:
    return [schedule(step) for step in range(num_updates)]


@given(PLANS, st.integers(0, 400))
def test_the_factor_is_the_written_law(plan: Plan, step: int) -> None:
    if step < plan.warmup:
        due = (step + 1) / plan.warmup
    else:
        share = (step + 1 - plan.warmup - plan.stable) / plan.decay
        left = LEFT[plan.shape](min(max(share, 0.0), 1.0))
        due = plan.minimum + (1 - plan.minimum) * left
    assert plan.schedule()(step) == pytest.approx(due, rel=1e-12, abs=1e-14)


@given(PLANS)
def test_the_first_update_has_a_share_of_the_warmup_and_its_last_the_peak(plan: Plan) -> None:
    plan = plan._replace(warmup=plan.warmup + 1)
    schedule = plan.schedule()
    assert schedule(0) == 1 / plan.warmup
    assert schedule(plan.warmup - 1) == 1.0


@given(PLANS, st.integers(0, 10_000))
def test_the_minimum_is_used_on_the_last_update_and_after_it_and_not_before(
    plan: Plan, later: int
) -> None:
    schedule = plan.schedule()
    assert schedule(plan.total - 1) == plan.minimum
    assert schedule(plan.total - 1 + later) == plan.minimum
    if plan.decay > 1:
        assert schedule(plan.total - 2) > plan.minimum


@given(PLANS)
def test_the_factor_rises_then_stays_then_falls_and_never_leaves_its_range(plan: Plan) -> None:
    used = factors(plan.schedule(), plan.total + 3)
    rise, stay = used[: plan.warmup], used[plan.warmup : plan.warmup + plan.stable]
    fall = used[plan.warmup + plan.stable :]
    assert all(before < after for before, after in pairwise(rise))
    assert set(stay) <= {1.0}
    assert all(before >= after - ROUNDING for before, after in pairwise(fall))
    assert max(used) <= 1.0
    assert min(used) >= min(plan.minimum, used[0]) - ROUNDING


@given(PLANS)
def test_no_update_changes_the_factor_by_more_than_its_shape_does(plan: Plan) -> None:
    rise = 1 / plan.warmup if plan.warmup else 0.0
    fall = (1 - plan.minimum) * STRIDE[plan.shape](1 / plan.decay)
    for before, after in pairwise(factors(plan.schedule(), plan.total + 3)):
        assert abs(after - before) <= max(rise, fall) + 1e-12


@given(PLANS, st.permutations(range(30)))
def test_a_factor_depends_on_the_step_and_on_nothing_asked_before(
    plan: Plan, order: list[int]
) -> None:
    schedule = plan.schedule()
    asked = {step: schedule(step) for step in order}
    assert asked == {step: plan.schedule()(step) for step in range(30)}


@given(PLANS)
def test_the_usual_names_are_the_one_schedule_without_a_plateau(plan: Plan) -> None:
    plan = plan._replace(stable=0)
    given_plan: dict[str, Any] = {
        "total": plan.total,
        "warmup": plan.warmup,
        "minimum": plan.minimum,
    }
    of: dict[Shape, Callable[..., Curve]] = {
        shapes.Linear(): linear,
        shapes.Cosine(): cosine,
        shapes.Power(power=2): lambda **arguments: polynomial(**arguments, power=2),
    }
    for shape, make in of.items():
        assert make(**given_plan) == plan._replace(shape=shape).schedule()


@given(st.integers(0, 40), st.integers(1, 60), st.integers(0, 120))
def test_transformers_is_one_update_late(warmup: int, decay: int, step: int) -> None:
    ours = linear(total=warmup + decay, warmup=warmup)
    theirs = presets.hf_linear(total=warmup + decay, warmup=warmup)
    assert theirs(step + 1) == pytest.approx(ours(step), rel=1e-12, abs=1e-14)


@given(st.integers(1, 500), st.integers(0, 2000))
def test_inverse_sqrt_counts_the_updates_from_one(warmup: int, step: int) -> None:
    count = step + 1
    due = min(count / warmup, math.sqrt(warmup / count))
    assert inverse_sqrt(warmup=warmup)(step) == pytest.approx(due, rel=1e-12)


def test_inverse_sqrt_stops_at_its_minimum_but_warms_up_below_it() -> None:
    schedule = inverse_sqrt(warmup=4, minimum=0.5)
    assert factors(schedule, 4) == [0.25, 0.5, 0.75, 1.0]
    assert [schedule(15), schedule(16), schedule(1000)] == [0.5, 0.5, 0.5]


def test_inverse_sqrt_without_a_warmup_falls_by_its_timescale() -> None:
    assert inverse_sqrt(timescale=3)(8) == 0.5


@pytest.mark.parametrize("shape", LEFT, ids=repr)
def test_a_shape_is_one_minus_what_is_left(shape: Shape) -> None:
    for q in (0.0, 0.1, 0.25, 0.5, 0.9, 1.0):
        assert shape(q) == pytest.approx(1 - LEFT[shape](q), abs=1e-15)


def test_a_function_from_0_to_1_is_a_shape_too() -> None:
    schedule = warmup_stable_decay(total=4, shape=lambda q: q**3)
    assert factors(schedule, 5) == [1 - 1 / 64, 1 - 8 / 64, 1 - 27 / 64, 0.0, 0.0]


def test_a_curve_that_does_not_hold_runs_on_as_its_last_leg_does() -> None:
    line = Curve.through((0, 1.0), (4, 0.0, shapes.Linear()), holds=False)
    assert factors(line, 7) == [1.0, 0.75, 0.5, 0.25, 0.0, -0.25, -0.5]


def test_a_curve_that_does_not_hold_meets_its_last_point_exactly() -> None:
    curve = Curve.through((0, 1.0), (4, 0.1, shapes.Linear()), holds=False)
    assert curve(4) == 0.1


def test_a_curve_jumps_where_two_points_share_an_update() -> None:
    line = shapes.Linear()
    curve = Curve(start=(0, 0.0), legs=(Leg(2, 1.0, line), Leg(2, 0.5, line), Leg(4, 0.0, line)))
    assert factors(curve, 6) == [0.0, 0.5, 0.5, 0.25, 0.0, 0.0]
    assert Curve.through(curve.start, *curve.legs) == curve


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.lists(st.floats(0.0, 1.0), min_size=5, max_size=5),
)
def test_joined_schedules_are_their_lists_put_end_to_end(
    lengths: list[int], minima: list[float]
) -> None:
    parts = tuple(cosine(total=7, warmup=2, minimum=m) for m in minima[: len(lengths) + 1])
    joined = Joined(parts=parts, at=tuple(sum(lengths[: i + 1]) for i in range(len(lengths))))
    due = [
        part(step)
        for part, length in zip(parts, [*lengths, 9], strict=True)
        for step in range(length)
    ]
    assert factors(joined, len(due)) == due


def test_a_warmup_goes_before_any_schedule() -> None:
    schedule = with_warmup(WarmRestarts(first=2), warmup=4)
    assert factors(schedule, 8) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 1.0, 0.5])
    assert with_warmup(Constant(), warmup=0) == Constant()


def test_restarts_that_grow_fall_on_whole_updates_however_late() -> None:
    # A logarithm in floating point puts such a step into the cycle before.
    restarts = WarmRestarts(first=1, growth=3)
    begins = [(3**cycle - 1) // 2 for cycle in range(36)]
    assert [restarts(step) for step in begins] == [1.0] * len(begins)
    assert all(restarts(step - 1) < 1.0 for step in begins[2:20])


@pytest.mark.parametrize("schedule", EVERY_KIND, ids=repr)
class TestEveryKind:
    def test_gives_a_finite_factor_for_every_step(self, schedule: Schedule) -> None:
        for step in range(13):
            assert isinstance(schedule(step), float)
            assert math.isfinite(schedule(step))

    def test_survives_a_pickle_and_a_copy(self, schedule: Schedule) -> None:
        for twin in (pickle.loads(pickle.dumps(schedule)), copy.deepcopy(schedule)):
            assert twin == schedule
            assert hash(twin) == hash(schedule)
            assert factors(twin, 13) == factors(schedule, 13)

    def test_prints_what_makes_it(self, schedule: Schedule) -> None:
        assert eval(repr(schedule), vars(schedules) | vars(shapes)) == schedule

    def test_cannot_be_changed(self, schedule: Schedule) -> None:
        for field in fields(schedule):  # type: ignore[arg-type]
            with pytest.raises(FrozenInstanceError):
                setattr(schedule, field.name, 3)

    def test_takes_the_whole_numbers_of_numpy(self, schedule: Schedule) -> None:
        assert schedule(np.int64(5)) == schedule(5)

    @pytest.mark.parametrize("step", [True, 1.0, "1", None])
    def test_refuses_a_step_that_is_not_a_whole_number(
        self, schedule: Schedule, step: object
    ) -> None:
        with pytest.raises(TypeError, match=r"`step=.*` is a `.*`, but it is a count"):
            schedule(step)  # type: ignore[arg-type]

    def test_refuses_a_step_before_the_first(self, schedule: Schedule) -> None:
        with pytest.raises(ValueError, match="`step=-1` must be at least 0"):
            schedule(-1)

    def test_drives_lambda_lr_and_keeps_the_ratio_of_the_groups(self, schedule: Schedule) -> None:
        a, b = (torch.zeros((), requires_grad=True) for _ in range(2))
        optimizer = SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.4}])
        scheduler, used = LambdaLR(optimizer, schedule), []
        for _ in range(12):
            used.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
        assert used == [[0.1 * factor, 0.4 * factor] for factor in factors(schedule, 12)]

    def test_resumes_in_lambda_lr_from_a_file_that_holds_plain_values(
        self, schedule: Schedule
    ) -> None:
        optimizer = SGD([torch.zeros((), requires_grad=True)], lr=1.0)
        scheduler = LambdaLR(optimizer, schedule)
        for _ in range(7):
            optimizer.step()
            scheduler.step()
        file = io.BytesIO()
        torch.save(scheduler.state_dict(), file)
        file.seek(0)
        resumed = LambdaLR(SGD([torch.zeros((), requires_grad=True)], lr=1.0), schedule)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        resumed.optimizer.step()
        resumed.step()
        assert resumed.get_last_lr() == [schedule(8)]


@pytest.mark.parametrize(
    ("num_batches", "size"), [(1, 1), (1, 4), (4, 4), (5, 4), (13, 4), (12, 4), (100, 7)]
)
def test_updates_are_counted_as_the_windows_of_a_pass(num_batches: int, size: int) -> None:
    batches = list(range(num_batches))
    windows = [batches[first : first + size] for first in range(0, num_batches, size)]
    full = [window for window in windows if len(window) == size]
    assert updates_per_epoch(num_batches, size) == len(windows)
    if full:
        assert updates_per_epoch(num_batches, size, drop_tail=True) == len(full)
