"""Precision: the updates of torch's own autocast and GradScaler, and their state, to the bit."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from plain_loop import (
    Pair,
    classifier,
    distance,
    gradients,
    loss_sum,
    masked,
    norm_of,
    num_targets,
    pairs,
    true_gradient,
    weights,
)
from torch import Tensor, nn

import midstep as ms
from midstep.precision import LossScale

BATCHES = pairs(3, 2, 4, dtype=torch.float32)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


# -- autocast ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [(ms.FP32(), None), (ms.BF16(), torch.bfloat16), (ms.FP16(), torch.float16)],
)
@pytest.mark.parametrize("door", ["update", "loop"])
def test_forward_and_loss_run_in_the_precision_and_nothing_else_does(
    precision: Any, dtype: torch.dtype | None, door: str
) -> None:
    model = classifier(torch.float32)
    updater = ms.Updater(model, sgd(model), precision=precision)
    seen: list[tuple[bool, torch.dtype]] = []

    def loss(m: nn.Module, b: Pair) -> ms.LossSum:
        scores = m(b[0])
        seen.append((torch.is_autocast_enabled("cpu"), scores.dtype))
        return ms.cross_entropy(scores, b[1])

    for window in updater.windows(BATCHES, size=3):
        if door == "update":
            updater.update(window, loss)
            continue
        for batch in window:
            assert not torch.is_autocast_enabled("cpu")
            with window.forward():
                value = loss(model, batch)
            assert not torch.is_autocast_enabled("cpu")
            window.backward(value)
        window.step()
    assert seen == [(dtype is not None, dtype or torch.float32)] * 3


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_inside_the_forward_leaves_autocast_as_it_was(error: type[BaseException]) -> None:
    model = classifier(torch.float32)
    updater = ms.Updater(model, sgd(model), precision=ms.BF16())

    def loss(*_: Any) -> Tensor:
        raise error

    with pytest.raises(error):
        updater.update(BATCHES, loss)
    assert not torch.is_autocast_enabled("cpu")


def test_the_callers_own_autocast_is_still_there_after_a_window() -> None:
    model = classifier(torch.float32)
    updater = ms.Updater(model, sgd(model), precision=ms.FP16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        updater.update(BATCHES, lambda m, b: ms.cross_entropy(m(b[0]), b[1]))
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16


@pytest.mark.parametrize("precision", [ms.FP32(), ms.BF16()])
def test_inside_the_callers_autocast_a_forward_sees_the_weights_of_the_last_step(
    precision: Any,
) -> None:
    """torch keeps the casts of weights until the outermost autocast ends, steps or no steps."""

    def losses() -> list[float | None]:
        model = classifier(torch.float32)
        updater = ms.Updater(model, sgd(model), precision=precision)
        return [
            updater.update(BATCHES, lambda m, b: ms.cross_entropy(m(b[0]), b[1])).loss_mean
            for _ in range(4)
        ]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = losses()
    assert len(set(found)) == 4
    if isinstance(precision, ms.BF16):
        assert found == losses()


def test_a_bf16_window_is_the_plain_autocast_loop() -> None:
    model, full = classifier(torch.float32), classifier(torch.float32)
    total = sum(map(num_targets, BATCHES))
    for x, y in BATCHES:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = full(x)
        (F.cross_entropy(scores.float(), y, reduction="sum") / total).backward()
    updater = ms.Updater(model, sgd(model, 0.0), precision=ms.BF16())
    updater.update(BATCHES, lambda m, b: ms.cross_entropy(m(b[0]), b[1]), count=ms.targets())
    # bf16 keeps 8 bits: a seed that is rounded in another place moves the last of them.
    assert distance(gradients(model), gradients(full)) < 2e-3
    assert norm_of(gradients(model)) == pytest.approx(norm_of(gradients(full)), rel=5e-3)


# -- the loss scale is GradScaler's --------------------------------------------------------------


def moved(scaler: Any, *, found_inf: bool) -> None:
    """Drive a GradScaler through one step, as a plain loop does."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler.scale(torch.zeros(()))
    parameter.grad = torch.tensor([math.inf if found_inf else 0.0])
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


@given(
    overflows=st.lists(st.booleans(), max_size=40),
    init_scale=st.floats(1e-3, 1e38),
    growth_factor=st.floats(1.001, 16.0),
    backoff_factor=st.floats(0.1, 0.999),
    growth_interval=st.integers(1, 5),
    switch=st.integers(0, 40),
)
def test_the_scale_goes_where_gradscaler_goes_and_the_state_passes_both_ways(
    *,
    overflows: list[bool],
    init_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    switch: int,
) -> None:
    settings: dict[str, Any] = {
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": growth_interval,
    }
    theirs: Any = torch.amp.GradScaler("cpu", init_scale=init_scale, **settings)
    ours = ms.FP16(init_scale=init_scale, **settings).loss_scale()
    for index, found_inf in enumerate(overflows):
        if index == switch:  # each goes on from the other's state
            state = theirs.state_dict()
            theirs = torch.amp.GradScaler("cpu")
            theirs.load_state_dict(ours.state_dict())
            ours = ms.FP16().loss_scale()
            ours.load_state_dict(state)
        moved(theirs, found_inf=found_inf)
        ours.update(found_inf=found_inf)
        assert ours.state_dict() == theirs.state_dict()


def test_a_scale_that_is_lowered_for_ever_never_becomes_zero() -> None:
    scale = ms.FP16().loss_scale()
    for _ in range(500):
        scale.update(found_inf=True)
    assert scale.value > 0.0
    assert torch.tensor(1.0 / scale.value).isfinite()


def test_a_scale_that_grows_for_ever_never_becomes_infinite() -> None:
    scale = ms.FP16(growth_interval=1).loss_scale()
    for _ in range(500):
        scale.update(found_inf=False)
    assert torch.tensor(scale.value).isfinite()


@pytest.mark.parametrize("precision", [ms.FP32(), ms.BF16()])
def test_no_scale_stays_no_scale_and_takes_no_state_of_one(precision: Any) -> None:
    scale: LossScale = precision.loss_scale()
    scale.update(found_inf=True)
    assert (scale.value, scale.state_dict()) == (1.0, {})
    with pytest.raises(ValueError, match="is on and this precision has it off"):
        scale.load_state_dict(torch.amp.GradScaler("cpu").state_dict() or {"scale": 2.0})
    with pytest.raises(ValueError, match="is off and this precision has it on"):
        ms.FP16().loss_scale().load_state_dict(scale.state_dict())


@pytest.mark.parametrize(
    "settings",
    [
        {"init_scale": 0.0},
        {"init_scale": -1.0},
        {"init_scale": math.inf},
        {"init_scale": math.nan},
        {"init_scale": 1e39},
        {"growth_factor": 1.0},
        {"growth_factor": math.nan},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
    ],
)
def test_a_scale_that_could_not_recover_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="init_scale must be positive and finite"):
        ms.FP16(**settings)


def test_float16_parameters_cannot_be_trained_with_a_scale() -> None:
    model = classifier(torch.float16)
    with pytest.raises(ValueError, match="float16 parameters"):
        ms.Updater(model, sgd(model), precision=ms.FP16())


# -- float16 against the GradScaler loop ---------------------------------------------------------


class ScalerLoop:
    """The loop of torch's AMP examples, with one scale and one division a window."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.scaler: Any = torch.amp.GradScaler("cpu", **settings)

    def window(self, batches: list[Pair], max_norm: float) -> bool:
        total = sum(map(num_targets, batches))
        self.optimizer.zero_grad()
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.float16):
                scores = self.model(x)
            loss = F.cross_entropy(scores.float(), y, reduction="sum") / total
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = norm_of(gradients(self.model))
        if math.isfinite(norm) and norm > max_norm:
            for p in self.model.parameters():
                assert p.grad is not None
                p.grad.mul_(max_norm / norm)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return bool(self.scaler.get_scale() >= before)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("init_scale", [1.0, 1024.0, 2.0**24])
def test_fp16_windows_are_those_of_the_gradscaler_loop(
    fused: bool, counted: bool, init_scale: float
) -> None:
    settings: dict[str, Any] = {"init_scale": init_scale, "growth_interval": 2}
    ours, full = classifier(torch.float32), classifier(torch.float32)
    plain = ScalerLoop(full, torch.optim.AdamW(full.parameters(), lr=1e-3), **settings)
    updater = ms.Updater(
        ours,
        torch.optim.AdamW(ours.parameters(), lr=1e-3, fused=fused),
        clip=ms.ByGlobalNorm(0.5),
        precision=ms.FP16(**settings),
    )
    count = ms.targets() if counted else None
    applied = []
    for _ in range(16):
        scale = plain.scaler.get_scale()
        record = updater.update(BATCHES, lambda m, b: ms.cross_entropy(m(b[0]), b[1]), count=count)
        applied.append(plain.window(BATCHES, 0.5))
        assert record.loss_scale == scale  # one scale a window, the one it began with
        assert record.applied is applied[-1]
        assert updater.loss_scale.state_dict() == plain.scaler.state_dict()
    assert applied[-1]
    assert (False in applied) is (init_scale > 1024.0)
    # float16 keeps 11 bits, and Adam makes whole steps of the smallest gradients.
    assert distance(weights(ours), weights(full)) < 1e-4


def test_an_fp16_gradient_and_the_logged_loss_are_unscaled() -> None:
    model = classifier(torch.float32)
    updater = ms.Updater(model, sgd(model, 0.0), precision=ms.FP16(init_scale=4096.0))
    record = updater.update(BATCHES, loss_sum, count=ms.targets())
    x, y = torch.cat([b[0] for b in BATCHES]), torch.cat([b[1] for b in BATCHES])
    expected = true_gradient(model, lambda m: F.cross_entropy(m(x), y))
    assert record.loss_mean == pytest.approx(F.cross_entropy(model(x), y).item(), rel=2e-3)
    assert record.grad_norm == pytest.approx(norm_of(expected), rel=5e-3)
    assert distance(gradients(model), expected) < 2e-3


@pytest.mark.parametrize(
    "policy",
    [ms.Raise(), ms.Raise(every_microbatch=True), ms.Skip(max_consecutive=1)],
    ids=["raise", "raise looking", "skip"],
)
@pytest.mark.parametrize("door", ["update", "loop"])
def test_overflows_that_the_scale_explains_are_searched_through_under_any_policy(
    policy: Any, door: str
) -> None:
    model = classifier(torch.float32)
    updater = ms.Updater(model, sgd(model), precision=ms.FP16(init_scale=2.0**26), nonfinite=policy)
    verdicts: list[str] = []
    while "applied" not in verdicts:
        for window in updater.windows(BATCHES, size=3):
            if door == "update":
                record = updater.update(window, lambda m, b: ms.cross_entropy(m(b[0]), b[1]))
            else:
                for batch in window:
                    with window.forward():
                        value = ms.cross_entropy(model(batch[0]), batch[1])
                    window.backward(value)
                record = window.step()
            verdicts.append(record.verdict)
    assert verdicts[:3] == ["skipped_nonfinite"] * 3
    assert (updater.clock.step, updater.clock.update) == (1, len(verdicts))
    assert updater.loss_scale.value == 2.0 ** (26 - len(verdicts) + 1)


class Broken(nn.Module):
    """Finite losses and infinite gradients, at any scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.sqrt() + x).sum()


def test_what_the_scale_cannot_explain_is_the_policys() -> None:
    """The gradient of a root at 0 is infinite at any scale: backed off to 1, then raised."""
    model = Broken()
    updater = ms.Updater(model, sgd(model), precision=ms.FP16(init_scale=8.0))
    verdicts = []

    def run() -> Iterator[str]:
        while True:
            yield updater.update([torch.ones(2)], lambda m, x: m(x), count=ms.rows()).verdict

    with contextlib.suppress(ms.NonFiniteGradient):
        verdicts.extend(run())
    assert updater.loss_scale.value == 1.0
    assert updater.clock.update == 3  # 8, 4, 2; at 1 there is nothing left to blame on the scale
    with pytest.raises(ms.NonFiniteGradient):
        next(run())


def test_an_infinite_loss_is_never_blamed_on_the_scale() -> None:
    model = classifier(torch.float32)
    updater = ms.Updater(model, sgd(model), precision=ms.FP16())
    bad = (torch.full((2, 4), math.inf), torch.tensor([0, 1]))
    with pytest.raises(ms.NonFiniteGradient) as caught:
        updater.update([BATCHES[0], bad], loss_sum, count=ms.targets())
    assert caught.value.microbatch == 1
    assert updater.loss_scale.value == 2.0**16
    assert updater.clock.update == 0


def test_the_scale_moves_between_windows_only() -> None:
    model = classifier(torch.float32)
    updater = ms.Updater(model, sgd(model), precision=ms.FP16(init_scale=16.0, growth_interval=1))
    scales = []
    for window in updater.windows([*BATCHES, *BATCHES], size=3):
        for batch in window:
            with window.forward():
                value = ms.cross_entropy(model(batch[0]), batch[1])
            window.backward(value)
            scales.append(window.scale)
        window.step()
    assert scales == [16.0] * 3 + [32.0] * 3


def test_a_window_that_was_dropped_or_empty_does_not_move_the_scale() -> None:
    model = classifier(torch.float32)
    updater = ms.Updater(
        model, sgd(model), precision=ms.FP16(init_scale=16.0, growth_interval=1), empty=ms.Skip()
    )
    updater.update([masked(batch) for batch in BATCHES], loss_sum, count=ms.targets())
    for window in updater.windows(BATCHES, size=3):
        for _ in window:
            break
    assert updater.loss_scale.value == 16.0


# -- losses in half precision --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [3, 7, 1000, 1023])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("precision", [ms.FP32(), ms.FP16(init_scale=64.0)])
def test_a_loss_in_half_precision_does_not_tilt_the_gradient(
    dtype: torch.dtype, count: int, counted: bool, precision: Any
) -> None:
    """1 / count has no exact spelling in 8 or 11 bits, and the seed is not rounded to one."""

    class Dot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).sum().to(dtype)

    model = Dot()
    updater = ms.Updater(model, sgd(model, 0.0), precision=precision)
    x = [torch.tensor([1.0, 2.0]), torch.tensor([4.0, -1.0])]
    updater.update(
        x,
        lambda m, b: ms.LossSum(m(b), count),
        count=(lambda _: count) if counted else None,
    )
    exact = torch.tensor([5.0, 1.0]) / (2 * count)
    (grad,) = gradients(model)
    assert torch.allclose(grad, exact, rtol=1e-6, atol=0.0)


def test_a_half_precision_loss_after_a_wider_one_is_refused() -> None:
    model = nn.Linear(2, 1)
    updater = ms.Updater(model, sgd(model))
    dtypes = iter([torch.float32, torch.bfloat16])
    with pytest.raises(ms.WindowError, match="bfloat16 loss after a wider one"):
        updater.update(
            [torch.ones(1, 2)] * 2, lambda m, x: m(x).sum().to(next(dtypes)), count=ms.rows()
        )


@pytest.mark.parametrize("counted", [True, False])
def test_a_wider_loss_after_one_in_half_precision_is_exact(counted: bool) -> None:
    model = nn.Linear(2, 1, bias=False)
    updater = ms.Updater(model, sgd(model, 0.0))
    dtypes = iter([torch.bfloat16, torch.float32, torch.float64])
    updater.update(
        [torch.ones(1, 2)] * 3,
        lambda m, x: ms.LossSum(m(x).sum().to(next(dtypes)), 1),
        count=ms.rows() if counted else None,
    )
    assert gradients(model)[0].tolist() == [[pytest.approx(1.0, rel=1e-6)] * 2]


def test_a_model_in_bfloat16_trains_without_autocast() -> None:
    model = classifier(torch.bfloat16)
    updater = ms.Updater(model, sgd(model), clip=ms.ByGlobalNorm(1.0))
    batches = pairs(3, 2, 4, dtype=torch.bfloat16)
    first, *_, last = [
        updater.update(batches, loss_sum, count=ms.targets()).loss_mean for _ in range(20)
    ]
    assert first is not None
    assert last is not None
    assert last < first
