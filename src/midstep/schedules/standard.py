"""The usual schedules, in the convention of this package: every update does something.

The first update has the factor `1 / warmup`, update `warmup - 1` the peak, update `total - 1` the
minimum, and so has every update after it.
"""

from .checks import Shape, horizon, positive, ratio, whole_number
from .combined import Joined
from .curve import Curve
from .parts import Constant, InverseSqrt
from .schedule import Schedule
from .shapes import Cosine, Linear, Power

_LINEAR = Linear()
# The point from which a warm-up rises. It lies before the first update, which thereby is one
# update of the way up already.
_REST = (-1, 0.0)


def warmup_stable_decay(
    *,
    total: int,
    warmup: int = 0,
    stable: int = 0,
    minimum: float = 0.0,
    shape: Shape = _LINEAR,
) -> Curve:
    """Rise to the peak, stay there, then decay to the minimum on the last update.

        s < W:       (s + 1) / W
        s < W + S:   1
        afterwards:  1 - (1 - m) * shape(q),  q = clip((s + 1 - W - S) / (T - W - S), 0, 1)

    Args:
        total: T, all applied updates, the warm-up included; greater than `warmup + stable`.
        warmup: W, updates of the linear rise; 0 starts on the peak.
        stable: S, updates that stay on the peak after the warm-up.
        minimum: m, the last factor, as a ratio of the base rate; from 0 to 1.
        shape: Of the decay, from `midstep.schedules.shapes`.

    Returns:
        The schedule.

    Example:
        >>> from midstep.schedules.shapes import Sqrt
        >>> schedule = warmup_stable_decay(total=12, warmup=4, stable=3, minimum=0.1, shape=Sqrt())
        >>> [round(schedule(step), 2) for step in range(13)]
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 0.6, 0.43, 0.3, 0.2, 0.1, 0.1]

    Reference: Hu et al. 2024, arXiv:2404.06395; shapes: Hagele et al. 2024, arXiv:2405.18392.
    """
    total, warmup, stable = horizon(total=total, warmup=warmup, stable=stable)
    ratio("minimum", minimum)
    return Curve.through(
        _REST,
        (warmup - 1, 1.0, _LINEAR),
        (warmup + stable - 1, 1.0, _LINEAR),
        (total - 1, minimum, shape),
    )


def linear(*, total: int, warmup: int = 0, minimum: float = 0.0) -> Curve:
    """Rise to the peak, then fall in a straight line to the minimum on the last update.

        s < W:       (s + 1) / W
        afterwards:  m + (1 - m) * (1 - q),  q = clip((s + 1 - W) / (T - W), 0, 1)

    Args:
        total: T, all applied updates, the warm-up included; greater than `warmup`.
        warmup: W, updates of the linear rise.
        minimum: m, the last factor, as a ratio of the base rate; from 0 to 1.

    Returns:
        The schedule.

    Example:
        >>> [linear(total=6, warmup=2)(step) for step in range(7)]
        [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    return warmup_stable_decay(total=total, warmup=warmup, minimum=minimum)


def cosine(*, total: int, warmup: int = 0, minimum: float = 0.0) -> Curve:
    """Rise to the peak, then fall along half a cosine to the minimum on the last update.

        s < W:       (s + 1) / W
        afterwards:  m + (1 - m) * (1 + cos(pi q)) / 2,  q = clip((s + 1 - W) / (T - W), 0, 1)

    Args:
        total: T, all applied updates, the warm-up included; greater than `warmup`.
        warmup: W, updates of the linear rise.
        minimum: m, the last factor, as a ratio of the base rate; from 0 to 1.

    Returns:
        The schedule.

    Example:
        >>> schedule = cosine(total=1000, warmup=100, minimum=0.1)
        >>> schedule
        Curve(start=(-1, 0.0), legs=(Leg(update=99, factor=1.0, shape=Linear()),
              Leg(update=999, factor=0.1, shape=Cosine())), holds=True)
        >>> schedule(0), schedule(99), schedule(999)
        (0.01, 1.0, 0.1)

    Reference: Loshchilov & Hutter 2016, arXiv:1608.03983, without restarts.
    """
    return warmup_stable_decay(total=total, warmup=warmup, minimum=minimum, shape=Cosine())


def polynomial(*, total: int, warmup: int = 0, minimum: float = 0.0, power: float = 1.0) -> Curve:
    """Rise to the peak, then fall along a power to the minimum on the last update.

        s < W:       (s + 1) / W
        afterwards:  m + (1 - m) * (1 - q)^power,  q = clip((s + 1 - W) / (T - W), 0, 1)

    Args:
        total: T, all applied updates, the warm-up included; greater than `warmup`.
        warmup: W, updates of the linear rise.
        minimum: m, the last factor, as a ratio of the base rate; from 0 to 1.
        power: The exponent, greater than 0; 1 is `linear`.

    Returns:
        The schedule.

    Example:
        >>> [polynomial(total=4, power=2)(step) for step in range(5)]
        [0.5625, 0.25, 0.0625, 0.0, 0.0]
    """
    shape = Power(power=power)
    return warmup_stable_decay(total=total, warmup=warmup, minimum=minimum, shape=shape)


def constant(*, warmup: int = 0) -> Schedule:
    """Rise to the peak and stay there.

        f(s) = min(1, (s + 1) / W)

    Args:
        warmup: W, updates of the linear rise; 0 starts on the peak.

    Returns:
        The schedule.

    Example:
        >>> [constant(warmup=4)(step) for step in range(6)]
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    """
    warmup = whole_number("warmup", warmup)
    if warmup == 0:
        return Constant()
    return Curve.through(_REST, (warmup - 1, 1.0, _LINEAR))


def inverse_sqrt(
    *, warmup: int = 0, timescale: float | None = None, minimum: float = 0.0
) -> Schedule:
    """Rise to the peak, then fall with the square root of the updates applied, for ever.

        s < W:       (s + 1) / W
        afterwards:  max(m, sqrt(t / (t + s + 1 - W))),  which is sqrt(W / (s + 1)) for t = W

    Args:
        warmup: W, updates of the linear rise.
        timescale: t, updates after the peak until the factor is 1 / sqrt(2); None is `warmup`.
        minimum: m, the factor is never below it after the warm-up; from 0 to 1.

    Returns:
        The schedule.

    Raises:
        ValueError: Neither a warm-up nor a timescale says how fast to fall.

    Example:
        >>> [inverse_sqrt(warmup=4)(step) for step in (0, 3, 15, 63)]
        [0.25, 1.0, 0.5, 0.25]

    Reference: Vaswani et al. 2017, arXiv:1706.03762, equation 3; `presets.noam` has its rates.
    """
    warmup = whole_number("warmup", warmup)
    if timescale is None:
        if warmup == 0:
            raise ValueError(
                "`inverse_sqrt(warmup=0, timescale=None)` does not say how fast to fall, because "
                "the timescale is the warm-up unless it is given. Pass `timescale` in updates."
            )
        timescale = warmup
    positive("timescale", timescale)
    return with_warmup(InverseSqrt(timescale=timescale, minimum=minimum), warmup=warmup)


def with_warmup(schedule: Schedule, *, warmup: int) -> Schedule:
    """Put a linear warm-up before any schedule, whose clock starts when the warm-up is over.

        s < W:       (s + 1) / W
        afterwards:  schedule(s - W)

    Args:
        schedule: What follows; its own total does not include the warm-up.
        warmup: W, updates of the linear rise; 0 returns the schedule as it is.

    Returns:
        Both, joined end to end.

    Example:
        >>> from midstep.schedules import WarmRestarts
        >>> [with_warmup(WarmRestarts(first=2), warmup=2)(step) for step in range(6)]
        [0.5, 1.0, 1.0, 0.5, 1.0, 0.5]
    """
    warmup = whole_number("warmup", warmup)
    if warmup == 0:
        return schedule
    return Joined(parts=(constant(warmup=warmup), schedule), at=(warmup,))
