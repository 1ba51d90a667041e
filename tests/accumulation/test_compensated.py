"""Compensated sums: as if every addition were exact, in the memory of one gradient more."""

import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from summing import (
    UNIT,
    Held,
    cancelling,
    error_of,
    held_loss,
    held_sum,
    one,
    updater_of,
)
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import midstep as ms
from midstep.accumulation import Wide


def compensated() -> Wide:
    return Wide(compensated=True)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def rows(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 6, generator=generator) for _ in range(count)]


def loss_sum(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - 0.5).square().sum()


@pytest.mark.parametrize(("count", "least_gain"), [(64, 4.0), (1_000, 8.0)])
def test_a_sum_is_off_by_one_rounding_however_many_microbatches(
    count: int, least_gain: float
) -> None:
    batches = rows(count)
    found = []
    for accumulation in (None, compensated()):
        model = mlp()
        total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
        for x in batches:
            model.zero_grad()
            loss_sum(model, x).backward(torch.tensor(1.0 / (2 * count)))
            torch._foreach_add_(total, [p.grad.double() for p in model.parameters()])
        updater_of(model, accumulation).update(batches, loss_sum, count=ms.rows())
        found.append(error_of([p.grad for p in model.parameters()], total))
    assert found[1] < UNIT
    assert found[0] > least_gain * found[1]


MAGNITUDES = st.one_of(
    st.floats(-1.0, 1.0, width=32), st.integers(-60, 60).map(lambda e: 2.0**e), st.just(0.0)
)


@st.composite
def sums(draw: st.DrawFn) -> list[float]:
    """Numbers of any magnitude, some of which are taken back again, in any order."""
    signs = st.sampled_from([-1.0, 1.0])
    numbers = [draw(signs) * draw(MAGNITUDES) * 1.7 for _ in range(draw(st.integers(2, 30)))]
    back = [-x for x in numbers if draw(st.booleans())]
    mixed = draw(st.permutations(numbers + back))
    return mixed + [0.0] * (2 ** math.ceil(math.log2(len(mixed))) - len(mixed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(numbers=sums())
@settings(max_examples=60, deadline=None)
def test_a_sum_keeps_its_bound_at_any_magnitude_and_cancellation(
    dtype: torch.dtype, numbers: list[float]
) -> None:
    grads = [torch.tensor([x], dtype=torch.float64).to(dtype) for x in numbers]
    exact = [g.item() for g in grads]
    unit, count = torch.finfo(dtype).eps / 2, len(exact)
    bound = unit * abs(math.fsum(exact)) + (count * unit) ** 2 * math.fsum(map(abs, exact))
    found = held_sum(grads, compensated()).item()
    assert abs(math.fsum([found, *(-x for x in exact)])) <= bound * (1 + 8 * unit)


LOST = [(1e8, 3.0, -1e8, 0.0), (3.0, 1e8, -1e8, 0.0), (1.0, 1e8, 1.0, -1e8), (1e8, 1.0, 1.0, -1e8)]


@pytest.mark.parametrize("numbers", LOST)
def test_what_a_large_gradient_drowns_is_there_when_it_is_taken_back(
    numbers: tuple[float, ...],
) -> None:
    grads = [torch.tensor([x]) for x in numbers]
    assert held_sum(grads, compensated()).item() == math.fsum(numbers)
    assert held_sum(grads, None).item() != math.fsum(numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_sums_in_every_dtype_that_nothing_wider_helps(dtype: torch.dtype) -> None:
    big, small = 1 / torch.finfo(dtype).eps ** 2, 1.0 + 2.0j if dtype.is_complex else 1.0
    grads = [torch.full((3,), x, dtype=dtype) for x in (big, small, -big, 0.0)]
    model = Held(3, dtype=dtype)
    loss: Any = lambda model, x: (model(x).real if dtype.is_complex else model(x)).sum()  # noqa: E731
    updater_of(model, compensated()).update(grads, loss, count=one)
    assert torch.equal(model.weight.grad * 4, torch.full((3,), small, dtype=dtype).conj())


@pytest.mark.parametrize(
    "shape", [(), (0,), (2**18 + 5,), (3, 2**17), (2**10, 300)], ids=lambda s: "x".join(map(str, s))
)
def test_gradients_of_any_size_and_order_in_memory(shape: tuple[int, ...]) -> None:
    model = Held(*shape)
    if len(shape) == 2:  # columns lie side by side, in the gradient's memory, too
        model.weight.data = model.weight.data.t().contiguous().t()
    generator = torch.Generator().manual_seed(0)
    small = torch.randn(shape, generator=generator)
    grads = [torch.full(shape, 1e8), small, torch.full(shape, -1e8), small * 0.5]
    updater_of(model, compensated()).update(grads, held_loss, count=one)
    truth = torch.stack(grads).double().sum(0)
    found = model.weight.grad.double() * 4
    assert torch.all((found - truth).abs() <= UNIT * truth.abs() + (4 * UNIT) ** 2 * 2e8)


def asked_in_backwards(accumulation: Wide | None, num: int) -> list[int]:
    """Bytes that each backward of a window asks the allocator for."""
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 2048, bias=False), nn.Linear(2048, 1024, bias=False)]
    model = nn.Sequential(*layers)
    found = []
    batches = [torch.randn(1, 1024) for _ in range(num)]
    for window in updater_of(model, accumulation).windows(batches, size=num, count=one):
        for x in window:
            loss = model(x).square().sum()
            gc.collect()
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                window.backward(loss)
            found.append(sum(max(0, e.self_cpu_memory_usage) for e in seen.events()))
        window.step()
    return found


def test_rests_are_made_once_and_beside_them_only_blocks() -> None:
    plain, own = asked_in_backwards(None, 3), asked_in_backwards(compensated(), 3)
    more = [b - a for a, b in zip(plain, own, strict=True)]
    weights, blocks = 2 * 4 * 2**21, 2 * 2 * 4 * 2**18  # of each layer one and two
    assert abs(more[0]) < 2**16
    assert weights <= more[1] <= weights + blocks + 2**16
    assert more[2] <= blocks + 2**16 < weights


def live_bytes(shape: tuple[int, ...]) -> int:
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, Tensor)]
    return sum(t.nbytes for t in {t.data_ptr(): t for t in tensors if t.shape == shape}.values())


@pytest.mark.filterwarnings("ignore")  # of objects that the collector looks at
@pytest.mark.parametrize("end", ["step", "gradients", "drop"])
def test_nothing_is_kept_when_a_window_has_ended(end: str) -> None:
    shape = (123, 457)
    updater = updater_of(Held(*shape), compensated())
    batches = [torch.ones(shape)] * 4
    before = live_bytes(shape)
    for window in updater.windows(batches, size=4, count=one):
        for x in window:
            window.backward(held_loss(updater.model, x))
        assert updater.model.weight._backward_hooks
        if end == "gradients":
            window.gradients_()
        elif end == "step":
            window.step()
        else:
            break
        assert not updater.model.weight._backward_hooks
    del window, x
    assert not updater.model.weight._backward_hooks
    assert live_bytes(shape) <= before + 4 * 123 * 457  # `.grad` alone


def test_nothing_is_read_by_the_host() -> None:
    reads = {}
    for accumulation in (None, compensated()):
        updater = updater_of(mlp(), accumulation)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            updater.update(rows(6), loss_sum, count=ms.rows())
        names = [event.name for event in seen.events()]
        reads[accumulation is None] = [n for n in names if n in HOST_READS]
    assert reads[True] == reads[False]


HOST_READS = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"}


def test_a_window_of_one_microbatch_costs_nothing() -> None:
    names = {}
    for accumulation in (None, compensated()):
        updater = updater_of(mlp(), accumulation)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            updater.update(rows(1), loss_sum, count=ms.rows())
        names[accumulation is None] = [e.name for e in seen.events() if "aten" in e.name]
    assert names[True] == names[False]


# -- what is not finite ---------------------------------------------------------------------------

MOST = torch.finfo(torch.float32).max
INF = math.inf


def given_rows(numbers: tuple[float, ...]) -> list[Tensor]:
    return [torch.tensor([x, 1.0]) for x in numbers]


def four_times(model: nn.Module, x: Tensor) -> Tensor:
    """Undoes the seed of four microbatches."""
    return 4 * held_loss(model, x)


BROKEN = [
    ((1.0, INF, 1.0, 1.0), 1),
    ((1.0, 1.0, INF, -INF), 2),
    ((1.0, math.nan, 1.0, 1.0), 1),
    ((1.0, MOST, MOST, -MOST), 2),  # each is finite, and their sum in float32 is not
]


@pytest.mark.parametrize(("numbers", "culprit"), BROKEN)
@pytest.mark.parametrize("door", ["update", "look"])
def test_the_microbatch_that_is_not_finite_is_named(
    numbers: tuple[float, ...], culprit: int, door: str
) -> None:
    nonfinite = ms.Raise(every_microbatch=True) if door == "look" else ms.Raise()
    updater = updater_of(Held(2), compensated(), nonfinite=nonfinite)
    with pytest.raises(ms.NonFiniteGradient) as caught:
        updater.update(given_rows(numbers), four_times, count=one)
    assert caught.value.microbatch == culprit
    assert caught.value.parameters == {"weight": 1}
    record = updater.update(given_rows((1e8, 3.0, -1e8, 0.0)), four_times, count=one)
    assert record.applied
    assert updater.model.weight.grad.tolist() == [3.0, 4.0]


def test_a_finite_sum_at_the_end_of_the_range_stays_finite() -> None:
    """Inside the two-sum of these there is a number half a step beyond the largest."""
    numbers = (-1.5 * 2.0**104, MOST, 0.0, 0.0)
    updater = updater_of(Held(2), compensated(), clip=ms.ByValue(MOST))
    assert updater.update(given_rows(numbers), four_times, count=one).applied
    assert updater.model.weight.grad[0].item() == MOST - 2.0**104  # to even


def test_a_skipped_window_leaves_nothing_to_the_next() -> None:
    updater = updater_of(Held(2), compensated(), nonfinite=ms.Skip())
    for numbers in [(1e8, 3.0, INF, 0.0), (1e8, 3.0, 0.0, 1.0)]:
        updater.update(given_rows(numbers), held_loss, count=one)
    clean = held_sum(given_rows((1e8, 3.0, 0.0, 1.0)), compensated()) / 4
    assert torch.equal(updater.model.weight.grad, clean)


def test_a_dropped_window_leaves_nothing_to_the_next() -> None:
    updater = updater_of(Held(2), compensated())
    for window in updater.windows(given_rows((1e8, 3.0, 5.0, 0.0)), size=4, count=one):
        for x in window:
            window.backward(held_loss(updater.model, x))
        break  # never stepped
    updater.update(given_rows((0.0, 0.0, 0.0, 8.0)), held_loss, count=one)
    assert updater.model.weight.grad.tolist() == [2.0, 1.0]


def test_a_gradient_cleared_inside_a_window_takes_its_rest_along() -> None:
    model = Held(2)
    for window in updater_of(model, compensated()).windows(
        given_rows((1e8, 3.0, 5.0, 4.0)), size=4, count=one
    ):
        for x in window:
            if window.index == 2:
                model.zero_grad()
            window.backward(held_loss(model, x))
        window.step()
    assert model.weight.grad.tolist() == [2.25, 0.5]


# -- the doors ------------------------------------------------------------------------------------


def by_update(updater: ms.Updater, batches: list[Any]) -> Iterator[ms.UpdateRecord]:
    for window in updater.windows(batches, size=8, count=one):
        yield updater.update(window, weighted)


def by_streamed_loop(updater: ms.Updater, batches: list[Any]) -> Iterator[ms.UpdateRecord]:
    for window in updater.windows(batches, size=8):
        for part in window:
            with window.forward():
                loss = weighted(updater.model, part)
            window.backward(loss, count=1)
        yield window.step()


def by_looking(updater: ms.Updater, batches: list[Any]) -> Iterator[ms.UpdateRecord]:
    for window in updater.windows(batches, size=8, count=one):
        for part in window:
            with window.forward():
                loss = weighted(updater.model, part)
            window.backward(loss)
        window.gradients_()
        yield window.step()


def weighted(model: nn.Module, part: Any) -> Tensor:
    return loss_sum(model, part.x) * part.by


STAGES: dict[str, Any] = {
    "plain": dict,
    "clipped": lambda: {"clip": ms.ByGlobalNorm(0.05)},
    "float16, scaled": lambda: {"precision": ms.FP16(init_scale=2.0)},
    "fused AdamW, lazy": lambda: {"lazy": True},
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("door", [by_update, by_streamed_loop, by_looking])
def test_the_sum_is_right_through_every_door(stage: str, door: Any) -> None:
    model, stages = mlp(), STAGES[stage]()
    make = torch.optim.AdamW if "AdamW" in stage else torch.optim.SGD
    stages["optimizer"] = make(model.parameters(), lr=0.0, fused="AdamW" in stage or None)
    precision = stages.get("precision")
    parts = cancelling(rows(6), 2.0**20 if precision is None else 2.0**10)
    total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    scale = 1.0 if precision is None else 2.0
    for part in parts:
        model.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=precision is not None):
            loss = weighted(model, part)
        loss.backward(torch.tensor(scale / 8))
        torch._foreach_add_(total, [p.grad.double() / scale for p in model.parameters()])
    norm = math.sqrt(sum(float(t.square().sum()) for t in total))
    updater = updater_of(model, compensated(), **stages)
    for record in door(updater, parts * 2):
        assert record.applied
        assert record.grad_norm == pytest.approx(norm, rel=1e-6)
        coefficient = min(1.0, 0.05 / norm) if stage == "clipped" else 1.0
        assert record.clip_coefficient == pytest.approx(coefficient, rel=1e-6)
        found = [p.grad for p in model.parameters()]
        assert error_of(found, [t * coefficient for t in total]) < 1e-6
    assert updater.clock.step == 2


OPTIMIZERS: dict[str, Any] = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_as_on_the_sum_in_float64(name: str) -> None:
    model, twin = mlp(), mlp()
    theirs = OPTIMIZERS[name](list(twin.parameters()))
    schedule: Any = lambda step: 0.5**step  # noqa: E731
    ticks = torch.optim.lr_scheduler.LambdaLR(theirs, schedule)
    stages = {"optimizer": OPTIMIZERS[name](list(model.parameters())), "schedule": schedule}
    updater = updater_of(model, compensated(), **stages)
    parts = cancelling(rows(4))
    for _ in range(3):
        updater.update(parts, weighted, count=one)
        total = [torch.zeros_like(p, dtype=torch.float64) for p in twin.parameters()]
        for part in parts:
            twin.zero_grad()
            weighted(twin, part).backward(torch.tensor(1 / 6))
            torch._foreach_add_(total, [p.grad.double() for p in twin.parameters()])
        for p, t in zip(twin.parameters(), total, strict=True):
            p.grad = t.float()
        theirs.step()
        ticks.step()
    ends = [[p.detach().double() for p in m.parameters()] for m in (model, twin)]
    assert error_of(*ends) < 1e-6
