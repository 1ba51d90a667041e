"""What a schedule refuses when it is made, and the words it does it with."""

import math
from collections.abc import Callable

import pytest

from midstep.schedules import (
    Bounded,
    Constant,
    Curve,
    InverseSqrt,
    Joined,
    Leg,
    Scaled,
    WarmRestarts,
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

NAN, INF = math.nan, math.inf
VALUE_REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: cosine(total=100, warmup=-1), r"`warmup=-1` must be at least 0.*it is a count"),
    (lambda: cosine(total=100, warmup=100), r"`total=100` must be greater than `warmup=100`"),
    (lambda: cosine(total=0), r"`total=0` must be at least 1"),
    (lambda: warmup_stable_decay(total=9, warmup=4, stable=5), r"`warmup=4` plus `stable=5`"),
    (lambda: warmup_stable_decay(total=9, stable=-1), r"`stable=-1` must be at least 0"),
    (lambda: linear(total=9, minimum=-0.1), r"`minimum=-0\.1` must be a finite number, 0 or more"),
    (lambda: linear(total=9, minimum=1.1), r"`minimum=1\.1` must be from 0 to 1.*divide it by"),
    (lambda: linear(total=9, minimum=NAN), r"`minimum=nan` must be a finite number"),
    (lambda: linear(total=9, minimum=INF), r"`minimum=inf` must be a finite number"),
    (lambda: polynomial(total=9, power=0), r"`power=0` must be greater than 0"),
    (lambda: polynomial(total=9, power=NAN), r"`power=nan` must be a finite number"),
    (inverse_sqrt, r"does not say how fast to fall.*Pass `timescale`"),
    (lambda: inverse_sqrt(warmup=4, timescale=0), r"`timescale=0` must be greater than 0"),
    (lambda: inverse_sqrt(warmup=4, minimum=2), r"`minimum=2` must be from 0 to 1"),
    (lambda: InverseSqrt(timescale=4, elapsed=-1), r"`elapsed=-1` must be at least 0"),
    (lambda: Constant(factor=-1.0), r"`factor=-1\.0` must be a finite number"),
    (lambda: WarmRestarts(first=0), r"`first=0` must be at least 1"),
    (lambda: WarmRestarts(first=4, growth=0), r"`growth=0` must be at least 1"),
    (lambda: warmup_stable_decay(total=9, shape=lambda q: 1 - q), r"goes from 1 to 0.*one minus"),
    (lambda: Curve(start=(0, 1.0), legs=()), r"has no `legs`"),
    (lambda: Curve.through((5, 1.0), (4, 0.0, shapes.Linear())), r"updates \[5, 4\].*not fall"),
    (lambda: Curve(start=(4, 1.0), legs=(Leg(4, 0.0, shapes.Linear()),)), r"last leg must last"),
    (lambda: Curve.through((0, 1.0), (NAN, 0.0, shapes.Linear())), r"`update=nan` must be"),
    (lambda: Curve.through((0, 1.0), (4, -1.0, shapes.Linear())), r"`factor=-1\.0` must be"),
    (lambda: Joined(parts=(Constant(),), at=(3,)), r"1 `parts` and 1 steps in `at`"),
    (lambda: Joined(parts=(Constant(),) * 3, at=(5, 3)), r"`Joined\(at=\(5, 3\)\)` must not fall"),
    (lambda: Joined(parts=(Constant(),) * 2, at=(-1,)), r"`at=-1` must be at least 0"),
    (lambda: Scaled(schedule=Constant(), by=NAN), r"`by=nan` must be a finite number"),
    (lambda: Bounded(schedule=Constant(), total=0), r"`total=0` must be at least 1"),
    (lambda: with_warmup(Constant(), warmup=-1), r"`warmup=-1` must be at least 0"),
    (lambda: updates_per_epoch(0, 4), r"`num_batches=0` must be at least 1"),
    (lambda: updates_per_epoch(4, 0), r"`size=0` must be at least 1"),
    (lambda: updates_per_epoch(3, 4, drop_tail=True), r"is 0, because the only window is short"),
]
TYPE_REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: cosine(total=100.0), r"`total=100\.0` is a `float`.*whole. Pass an int"),  # type: ignore[arg-type]
    (lambda: cosine(total=True), r"`total=True` is a `bool`"),
    (lambda: cosine(total=100, warmup=0.1), r"`warmup=0\.1` is a `float`"),  # type: ignore[arg-type]
    (lambda: cosine(total=100, warmup=NAN), r"`warmup=nan` is a `float`"),  # type: ignore[arg-type]
    (lambda: linear(total=9, minimum=False), r"`minimum=False` is a `bool`"),
    (lambda: linear(total=9, minimum="0.1"), r"`minimum='0\.1'` is a `str`"),  # type: ignore[arg-type]
    (lambda: warmup_stable_decay(total=9, shape="cosine"), r"`shape='cosine'` is a `str`"),  # type: ignore[arg-type]
    (lambda: Joined(parts=(0.5,), at=()), r"`parts=0\.5` is a `float`.*called with a step"),  # type: ignore[arg-type]
    (lambda: Scaled(schedule=1.0, by=2.0), r"`schedule=1\.0` is a `float`"),  # type: ignore[arg-type]
    (lambda: cosine(100), r"takes 0 positional arguments"),  # type: ignore[call-arg]
    (lambda: Constant(1.0), r"positional argument"),  # type: ignore[call-arg]
]


@pytest.mark.parametrize(
    ("make", "message"), VALUE_REFUSED, ids=lambda case: case[:40] if isinstance(case, str) else ""
)
def test_a_wrong_value_is_refused_when_the_schedule_is_made(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"), TYPE_REFUSED, ids=lambda case: case[:40] if isinstance(case, str) else ""
)
def test_a_wrong_type_is_refused_when_the_schedule_is_made(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: presets.hf_linear(total=4, warmup=4),
            r"`total=4` must be greater than `warmup=4`",
        ),
        (lambda: presets.hf_cosine(total=4, minimum=2.0), r"`minimum=2\.0` must be from 0 to 1"),
        (lambda: presets.hf_wsd(warmup=4, stable=3, decay=0), r"`decay=0` must be at least 1"),
        (
            lambda: presets.megatron_inverse_sqrt(total=9, warmup=0),
            r"`warmup=0` must be at least 1",
        ),
        (lambda: presets.fairseq_inverse_sqrt(warmup=0), r"`warmup=0` must be at least 1"),
        (lambda: presets.noam(width=0, warmup=4), r"`width=0` must be greater than 0"),
        (lambda: presets.torch_one_cycle(total=12, peak=1.5), r"`peak=1\.5` must be from 0 to 1"),
        (lambda: presets.torch_one_cycle(total=12, peak=0.6, three_phase=True), "must not fall"),
        (lambda: presets.timm_cosine(total=12, warmup=4, start=-1.0), r"`start=-1\.0` must be"),
        (lambda: presets.torch_linear(total=0), r"`total=0` must be at least 1"),
        (lambda: presets.optax_polynomial(transition_steps=0), r"`transition_steps=0` must be"),
    ],
)
def test_a_preset_that_makes_no_sense_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
