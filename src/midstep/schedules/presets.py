"""Schedules as other libraries compute them, by name, for runs that must match theirs.

Each differs from the convention of this package in where the points of its curve lie (`W` warm-up,
`T` total, `m` minimum), and in what comes after the end:

    family                       begins     peak      minimum          after the end
    this package                 (-1, 0)    W - 1     T - 1            holds
    Transformers, torch, d2l     (0, 0)     W         T: never used    cosine rises again (not d2l)
    optax, timm, Megatron        (0, init)  W         T: never used    holds
    nanoGPT                      (-1, 0)    W         T: never used    holds
    torchtitan                   (-1, 0)    W - 1     T - 1            runs on
    one-cycle of torch           (0, 1/25)  0.3T - 1  T - 1            raises after T
    one-cycle of optax, fastai   (0, 1/25)  0.3T      T: never used    holds

A schedule that begins at `(0, 0)` spends update 0 at rate 0, which changes nothing but the moments.

In all of them `total` counts applied updates with the warm-up included, whatever the original
counts; factors are relative to the peak, so the base rate of the optimizer is the peak rate; and
`minimum` and `start` are ratios of it. A rate from 0.3 to 0.01 over 20 updates is

    >>> rate = Scaled(schedule=d2l_cosine(total=20, minimum=0.01 / 0.3), by=0.3)
    >>> [round(rate(step), 6) for step in (0, 10, 20, 30)]
    [0.3, 0.155, 0.01, 0.01]
"""

import math

from .checks import Shape, horizon, positive, ratio, whole_number
from .combined import Bounded, Joined, Scaled
from .curve import Curve
from .parts import Constant, InverseSqrt, WarmRestarts
from .schedule import Schedule
from .shapes import Cosine, Linear, Power
from .standard import inverse_sqrt

_LINEAR = Linear()
_COSINE = Cosine()


def _late(
    *,
    total: int,
    warmup: int = 0,
    stable: int = 0,
    start: float = 0.0,
    minimum: float = 0.0,
    shape: Shape,
    holds: bool = True,
) -> Curve:
    """Begin on update 0 at `start`, and be due at the minimum when training is over."""
    total, warmup, stable = horizon(total=total, warmup=warmup, stable=stable)
    ratio("minimum", minimum)
    ratio("start", start)
    return Curve.through(
        (0, start),
        (warmup, 1.0, _LINEAR),
        (warmup + stable, 1.0, _LINEAR),
        (total, minimum, shape),
        holds=holds,
    )


def hf_linear(*, total: int, warmup: int = 0) -> Curve:
    """`get_linear_schedule_with_warmup` of Transformers: from 0 to the peak to 0."""
    return _late(total=total, warmup=warmup, shape=_LINEAR)


def hf_cosine(*, total: int, warmup: int = 0, minimum: float = 0.0) -> Curve:
    """`cosine` and `cosine_with_min_lr` of Transformers: past the end the rate rises again."""
    return _late(total=total, warmup=warmup, minimum=minimum, shape=_COSINE, holds=False)


def hf_cosine_warmup_with_min_lr(*, total: int, warmup: int = 0, minimum: float = 0.0) -> Curve:
    """`cosine_warmup_with_min_lr` of Transformers: `cosine` of this package, but it rises again."""
    total, warmup, _ = horizon(total=total, warmup=warmup)
    ratio("minimum", minimum)
    return Curve.through(
        (-1, 0.0), (warmup - 1, 1.0, _LINEAR), (total - 1, minimum, _COSINE), holds=False
    )


def hf_polynomial(
    *, total: int, warmup: int = 0, minimum: float = 1e-7, power: float = 1.0
) -> Curve:
    """`get_polynomial_decay_schedule_with_warmup` of Transformers, whose `lr_end` is absolute."""
    return _late(total=total, warmup=warmup, minimum=minimum, shape=Power(power=power))


def hf_inverse_sqrt(*, warmup: int, timescale: float | None = None) -> Schedule:
    """`get_inverse_sqrt_schedule` of Transformers: the timescale is the warm-up, or 10,000."""
    warmup = whole_number("warmup", warmup)
    tail = InverseSqrt(timescale=(warmup or 10_000) if timescale is None else timescale, elapsed=0)
    return Joined(parts=(_ramp(warmup), tail), at=(warmup,)) if warmup else tail


def hf_wsd(
    *, warmup: int, stable: int, decay: int, minimum: float = 0.0, shape: Shape = _COSINE
) -> Curve:
    """`get_wsd_schedule` of Transformers: the warm-up begins at the minimum, not at 0."""
    total = _sum_of_phases(warmup, stable, decay)
    return _late(
        total=total, warmup=warmup, stable=stable, start=minimum, minimum=minimum, shape=shape
    )


def torch_linear(*, total: int, start: float = 1 / 3, end: float = 1.0) -> Curve:
    """`LinearLR` of torch, whose `total_iters` is `total`: from `start` to `end`, then it holds."""
    return Curve.through((0, start), (whole_number("total", total, at_least=1), end, _LINEAR))


def torch_warmup_cosine(
    *, total: int, warmup: int = 0, start: float = 1 / 3, minimum: float = 0.0
) -> Curve:
    """`SequentialLR` of `LinearLR` and `CosineAnnealingLR` of torch: it rises again at the end.

    There the cosine counts without the warm-up: `T_max` is `total - warmup`. With `warmup=0` this
    is `CosineAnnealingLR` alone.
    """
    return _late(
        total=total, warmup=warmup, start=start, minimum=minimum, shape=_COSINE, holds=False
    )


def torch_polynomial(*, total: int, power: float = 1.0) -> Curve:
    """`PolynomialLR` of torch, whose `total_iters` is `total`: to 0, and no warm-up."""
    return _late(total=total, shape=Power(power=power))


def torch_warm_restarts(*, first: int, growth: int = 1, minimum: float = 0.0) -> WarmRestarts:
    """`CosineAnnealingWarmRestarts` of torch: `T_0` is `first`, `T_mult` is `growth`."""
    return WarmRestarts(first=first, growth=growth, minimum=minimum)


def torch_one_cycle(
    *,
    total: int,
    peak: float = 0.3,
    start: float = 1 / 25,
    minimum: float = 1 / 25e4,
    three_phase: bool = False,
    shape: Shape = _COSINE,
) -> Bounded:
    """`OneCycleLR` of torch, which raises past `total`; momentum is left alone.

    The peak falls on update `peak * total - 1`, which may lie between two updates and then is never
    used. `three_phase` falls to `start` as fast as it rose, and then on to `minimum`. `peak`
    is torch's `pct_start`, `start` is `1 / div_factor`, `minimum` is `start / final_div_factor`.
    """
    total, _, _ = horizon(total=total)
    ratio("peak", peak)
    top = peak * total - 1
    back = ((2 * top, start, shape),) if three_phase else ()
    curve = Curve.through(
        (min(0, top), start), (top, 1.0, shape), *back, (total - 1, minimum, shape), holds=False
    )
    return Bounded(schedule=curve, total=total)


def timm_cosine(
    *,
    total: int,
    warmup: int = 0,
    start: float = 0.0,
    minimum: float = 0.0,
    runs_in_warmup: bool = True,
) -> Schedule:
    """`CosineLRScheduler` of timm: by default its cosine runs during the warm-up too.

    So the rate jumps down where the warm-up ends, and the peak is never used.
    `runs_in_warmup=False` is `warmup_prefix=True` there, with `t_initial` of `total - warmup`.
    """
    whole = _late(total=total, warmup=warmup, start=start, minimum=minimum, shape=_COSINE)
    if not runs_in_warmup or warmup == 0:
        return whole
    late = Curve.through((-warmup, 1.0), (total - warmup, minimum, _COSINE))
    return Joined(parts=(_ramp(warmup, start=start), late), at=(warmup,))


def timm_wsd(
    *,
    warmup: int,
    stable: int,
    decay: int,
    start: float = 0.0,
    minimum: float = 0.0,
    shape: Shape = _COSINE,
) -> Curve:
    """`WSDLRScheduler` of timm, where `t_initial` is `stable + decay`."""
    total = _sum_of_phases(warmup, stable, decay)
    return _late(
        total=total, warmup=warmup, stable=stable, start=start, minimum=minimum, shape=shape
    )


def optax_warmup_cosine(
    *, total: int, warmup: int, start: float = 0.0, minimum: float = 0.0
) -> Curve:
    """`warmup_cosine_decay_schedule` of optax, where `decay_steps` includes the warm-up."""
    return _late(total=total, warmup=warmup, start=start, minimum=minimum, shape=_COSINE)


def optax_polynomial(
    *, transition_begin: int = 0, transition_steps: int, minimum: float = 0.0, power: float = 1.0
) -> Curve:
    """`polynomial_schedule` of optax: it holds until `transition_begin` and decays after that."""
    begin = whole_number("transition_begin", transition_begin)
    steps = whole_number("transition_steps", transition_steps, at_least=1)
    return _late(total=begin + steps, stable=begin, minimum=minimum, shape=Power(power=power))


def optax_one_cycle(
    *, total: int, peak: float = 0.3, start: float = 1 / 25, minimum: float = 1 / 25e4
) -> Curve:
    """`cosine_onecycle_schedule` of optax: the peak is on update `int(peak * total)`."""
    total, _, _ = horizon(total=total)
    ratio("peak", peak)
    top = int(peak * total)
    return Curve.through((0, start), (top, 1.0, _COSINE), (total, minimum, _COSINE))


def d2l_cosine(*, total: int, warmup: int = 0, start: float = 0.0, minimum: float = 0.0) -> Curve:
    """`CosineScheduler` of Dive into Deep Learning, whose `max_update` is `total`."""
    return _late(total=total, warmup=warmup, start=start, minimum=minimum, shape=_COSINE)


def nanogpt_cosine(*, total: int, warmup: int = 0, minimum: float = 0.1) -> Curve:
    """`get_lr` of nanoGPT: the warm-up is `(s + 1) / (W + 1)`, the peak one update later."""
    total, warmup, _ = horizon(total=total, warmup=warmup)
    ratio("minimum", minimum)
    begin = (-1, 0.0) if warmup else (0, 1.0)
    return Curve.through(begin, (warmup, 1.0, _LINEAR), (total, minimum, _COSINE))


def torchtitan_wsd(
    *, warmup: int, stable: int, decay: int, minimum: float = 0.0, shape: Shape = _LINEAR
) -> Curve:
    """`linear_warmup_stable_decay` of torchtitan: past the end it falls below the minimum."""
    total = _sum_of_phases(warmup, stable, decay)
    ratio("minimum", minimum)
    return Curve.through(
        (-1, 0.0),
        (warmup - 1, 1.0, _LINEAR),
        (warmup + stable - 1, 1.0, _LINEAR),
        (total - 1, minimum, shape),
        holds=False,
    )


def megatron(
    *,
    total: int,
    warmup: int = 0,
    stable: int = 0,
    start: float = 0.0,
    minimum: float = 0.0,
    shape: Shape = _COSINE,
) -> Curve:
    """`linear`, `cosine` and `WSD` decays of Megatron-LM, which counts in samples.

    `start` is `init_lr`, `total` is `lr_decay_steps`, and `stable` is what `lr_wsd_decay_steps`
    leaves between the warm-up and the decay.
    """
    return _late(
        total=total, warmup=warmup, stable=stable, start=start, minimum=minimum, shape=shape
    )


def megatron_inverse_sqrt(
    *, total: int, warmup: int, start: float = 0.0, minimum: float = 0.0
) -> Joined:
    """`inverse-square-root` decay of Megatron-LM: the minimum from update `total + 1` on."""
    warmup = whole_number("warmup", warmup, at_least=1)
    total, _, _ = horizon(total=total, warmup=warmup)
    tail = InverseSqrt(timescale=warmup, minimum=minimum, elapsed=0)
    parts = (_ramp(warmup, start=start), tail, Constant(factor=minimum))
    return Joined(parts=parts, at=(warmup, total + 1))


def fairseq_inverse_sqrt(*, warmup: int, start: float = 0.0) -> Joined:
    """`inverse_sqrt` of fairseq, where `start` is `warmup_init_lr` as a ratio."""
    warmup = whole_number("warmup", warmup, at_least=1)
    tail = InverseSqrt(timescale=warmup, elapsed=0)
    return Joined(parts=(_ramp(warmup, start=start), tail), at=(warmup,))


def noam(*, width: int, warmup: int) -> Scaled:
    """The rate of Vaswani et al. for a model of this width, to be used on a base rate of 1.

        width^-0.5 * min(k^-0.5, k * warmup^-1.5),  k = s + 1

    Reference: Vaswani et al. 2017, arXiv:1706.03762, equation 3.
    """
    positive("width", width)
    warmup = whole_number("warmup", warmup, at_least=1)
    return Scaled(schedule=inverse_sqrt(warmup=warmup), by=1 / math.sqrt(width * warmup))


def fastai_one_cycle(
    *, total: int, peak: float = 0.25, start: float = 1 / 25, minimum: float = 1e-5
) -> Curve:
    """`fit_one_cycle` of fastai: the peak is on update `peak * total`, the minimum never used."""
    total, _, _ = horizon(total=total)
    ratio("peak", peak)
    return Curve.through((0, start), (peak * total, 1.0, _COSINE), (total, minimum, _COSINE))


def _ramp(warmup: int, *, start: float = 0.0) -> Curve:
    ratio("start", start)
    return Curve.through((0, start), (warmup, 1.0, _LINEAR))


def _sum_of_phases(warmup: int, stable: int, decay: int) -> int:
    phases = whole_number("warmup", warmup) + whole_number("stable", stable)
    return phases + whole_number("decay", decay, at_least=1)
