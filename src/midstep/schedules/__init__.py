"""Learning-rate schedules: pure functions of the step, safe to save and to compare.

A schedule answers one question: by what factor is the base rate multiplied on step `s`? The step
is the number of updates applied so far, so the first update has `s = 0`, and an update that was
skipped does not advance it. A schedule holds no state, so any step may be asked for in any order,
and resuming needs the number of the step alone.

    >>> schedule = cosine(total=1000, warmup=100, minimum=0.1)
    >>> [round(schedule(step), 3) for step in (0, 49, 99, 549, 999, 5000)]
    [0.01, 0.5, 1.0, 0.55, 0.1, 0.1]

It is what `torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)` wants; every parameter group
keeps its own base rate, and the ratios between groups stay as they are.

The convention here, with warm-up `W`, plateau `S`, total `T` and minimum `m`, all in applied
updates and `T` including the warm-up:

    s < W:       (s + 1) / W
    s < W + S:   1
    afterwards:  m + (1 - m) * decay(q),  q = clip((s + 1 - W - S) / (T - W - S), 0, 1)

so no update runs at rate 0, the peak and the minimum are each used, and the minimum falls exactly
on the last update, `s = T - 1`. Most other libraries differ by an update at one end or the other;
`presets` reproduces them by name.
"""

from . import presets, shapes
from .checks import Shape
from .combined import Bounded, Joined, Scaled
from .curve import Curve, Leg
from .epochs import updates_per_epoch
from .parts import Constant, InverseSqrt, WarmRestarts
from .schedule import Factor, Schedule
from .standard import (
    constant,
    cosine,
    inverse_sqrt,
    linear,
    polynomial,
    warmup_stable_decay,
    with_warmup,
)

__all__ = [
    # The usual ones, each with a warm-up
    "constant",
    "linear",
    "cosine",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
    # Composition
    "with_warmup",
    "Joined",
    "Scaled",
    "Bounded",
    # What they are made of
    "Curve",
    "Leg",
    "Constant",
    "InverseSqrt",
    "WarmRestarts",
    "Schedule",
    "Factor",
    "Shape",
    "shapes",
    # The same as elsewhere
    "presets",
    # Counting
    "updates_per_epoch",
]
