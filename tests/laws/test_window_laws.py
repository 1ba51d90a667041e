"""Laws of windows: whatever the cut, the door, the mask or the accident, the gradient is exact."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from plain_loop import (
    IGNORED,
    Pair,
    classifier,
    clone,
    distance,
    full_batch_gradient,
    gradients,
    joined,
    loss_sum,
    norm_of,
    num_targets,
    true_gradient,
    weights,
)
from torch import Tensor, nn

import midstep as ms

CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 0.25], dtype=torch.float64)


@st.composite
def batches_of(draw: st.DrawFn, min_batches: int = 1, max_batches: int = 6) -> list[Pair]:
    """Batches of any sizes with any mask, of which at least one target is left."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=min_batches, max_size=max_batches))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    share = draw(st.sampled_from([0.0, 0.3, 0.8]))
    found = []
    for size in sizes:
        y = torch.randint(3, (size,), generator=generator)
        y[torch.rand(size, generator=generator) < share] = IGNORED
        found.append((torch.randn(size, 4, generator=generator, dtype=torch.float64), y))
    if all(num_targets(batch) == 0 for batch in found):
        found[-1][1][0] = 1
    return found


def run_window(
    updater: ms.Updater, window: ms.Window[Pair], loss: Callable[..., Any], door: str
) -> ms.UpdateRecord:
    if door == "update":
        return updater.update(window, loss)
    for batch in window:
        with window.forward():
            value = loss(updater.model, batch)
        window.backward(value)
    return window.step()


def resting(model: nn.Module) -> ms.Updater:
    """An updater whose steps change nothing, so that the gradient stays to be looked at."""
    return ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.0))


@given(
    batches=batches_of(),
    size=st.integers(1, 7),
    counted=st.booleans(),
    door=st.sampled_from(["update", "loop"]),
)
def test_any_split_of_a_batch_gives_the_full_batch_gradient(
    batches: list[Pair], size: int, counted: bool, door: str
) -> None:
    model = classifier()
    updater = resting(model)
    count = ms.targets() if counted else None
    loss = lambda m, b: ms.cross_entropy(m(b[0]), b[1])  # noqa: E731
    start = 0
    windows = updater.windows(batches, size=size, count=count, empty=ms.Skip())
    for window in windows:
        record = run_window(updater, window, loss, door)
        group = batches[start : start + size]
        start += size
        assert record.num_microbatches == len(group)
        total = sum(map(num_targets, group))
        assert record.denominators == {"loss": total}
        if total == 0:
            assert record.verdict == "skipped_empty"
            continue
        assert distance(gradients(model), full_batch_gradient(model, group)) < 1e-12
        x, y = joined(group)
        assert record.loss_mean == pytest.approx(F.cross_entropy(model(x), y).item(), abs=1e-12)
    assert start >= len(batches)


@given(
    batch=batches_of(max_batches=1),
    rows=st.integers(1, 6),
    smoothing=st.sampled_from([0.0, 0.1]),
    weighted=st.booleans(),
    counted=st.booleans(),
)
def test_any_cut_along_rows_gives_the_gradient_of_torchs_own_mean(
    batch: list[Pair], rows: int, smoothing: float, weighted: bool, counted: bool
) -> None:
    model = classifier()
    weight = CLASS_WEIGHTS if weighted else None

    def loss(m: nn.Module, b: Pair) -> ms.LossSum:
        return ms.cross_entropy(m(b[0]), b[1], weight=weight, label_smoothing=smoothing)

    updater = resting(model)
    count = ms.targets(weight=weight) if counted else None
    (window,) = [
        updater.update(window, loss) for window in updater.windows(batch, rows=rows, count=count)
    ]
    x, y = batch[0]
    expected = true_gradient(
        model, lambda m: F.cross_entropy(m(x), y, weight=weight, label_smoothing=smoothing)
    )
    assert window.num_microbatches == math.ceil(len(x) / rows)
    assert distance(gradients(model), expected) < 1e-12


@given(batches=batches_of(min_batches=2), targets=st.integers(1, 12))
def test_windows_by_targets_hold_at_least_so_many_and_are_exact(
    batches: list[Pair], targets: int
) -> None:
    model = classifier()
    updater = resting(model)
    start = 0
    for window in updater.windows(batches, targets=targets, count=ms.targets(), empty=ms.Skip()):
        record = updater.update(window, loss_sum)
        group = batches[start : start + record.num_microbatches]
        start += len(group)
        assert record.denominators["loss"] == sum(map(num_targets, group))
        if start < len(batches):
            assert record.denominators["loss"] >= targets
            assert sum(map(num_targets, group[:-1])) < targets
        if record.applied:
            assert distance(gradients(model), full_batch_gradient(model, group)) < 1e-12
    assert start == len(batches)


@given(batches=batches_of(), aux_weight=st.sampled_from([0.0, 0.1, 3.0]))
def test_every_term_is_divided_by_its_own_denominator(
    batches: list[Pair], aux_weight: float
) -> None:
    model = classifier()
    updater = resting(model)

    def count(b: Pair) -> dict[str, float]:
        return {"main": num_targets(b), "aux": b[0].numel()}

    def loss(m: nn.Module, b: Pair) -> dict[str, Tensor]:
        return {"main": loss_sum(m, b), "aux": aux_weight * m(b[0]).square().sum()}

    record = updater.update(batches, loss, count=count)
    x, y = joined(batches)

    def mean_of(m: nn.Module) -> Tensor:
        return F.cross_entropy(m(x), y) + aux_weight * m(x).square().sum() / x.numel()

    assert record.denominators == {"main": num_targets((x, y)), "aux": x.numel()}
    assert distance(gradients(model), true_gradient(model, mean_of)) < 1e-12
    assert record.loss_mean == pytest.approx(mean_of(model).item(), abs=1e-12)


@given(batches=batches_of(min_batches=2), counted=st.booleans(), fused=st.booleans())
def test_the_next_clipped_adamw_update_is_that_of_the_full_batch(
    batches: list[Pair], counted: bool, fused: bool
) -> None:
    model = classifier()
    twin = clone(model)
    settings = {"lr": 0.01, "weight_decay": 0.1, "fused": fused}
    updater = ms.Updater(
        model, torch.optim.AdamW(model.parameters(), **settings), clip=ms.ByGlobalNorm(0.5)
    )
    optimizer = torch.optim.AdamW(twin.parameters(), **settings)
    count = ms.targets() if counted else None
    loss = lambda m, b: ms.cross_entropy(m(b[0]), b[1])  # noqa: E731
    for _ in range(2):
        record = updater.update(batches, loss, count=count)
        x, y = joined(batches)
        optimizer.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        norm = norm_of(gradients(twin))
        for p in twin.parameters():
            assert p.grad is not None
            p.grad.mul_(min(1.0, 0.5 / norm))
        optimizer.step()
        assert record.grad_norm == pytest.approx(norm, rel=1e-12)
        assert record.clipped is (norm > 0.5)
        assert distance(gradients(model), gradients(twin)) < 1e-12
        # Adam divides by the root of the squares: where those vanish, rounding is all there is.
        assert distance(weights(model), weights(twin)) < 1e-9


class Accident(Exception):
    """What goes wrong in a body."""


class _Explodes(torch.autograd.Function):
    """An identity whose backward fails."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *_grads: Tensor) -> Tensor:
        raise Accident


ACCIDENTS = ("none", "break", "forward", "loss", "backward", "between", "interrupt")


def accident_in(
    updater: ms.Updater, window: ms.Window[Pair], accident: str, at: int
) -> Iterator[str]:
    """Run a window by hand, with one accident at one microbatch; yields when it was stepped."""
    for batch in window:
        now = accident if window.index == at else "none"
        if now == "break":
            return
        with window.forward():
            if now == "forward":
                raise Accident
            scores = updater.model(batch[0])
            if now == "interrupt":
                raise KeyboardInterrupt
            if now == "backward":
                scores = _Explodes.apply(scores)
            value = ms.cross_entropy(scores, batch[1])
            if now == "loss":
                raise Accident
        window.backward(value)
        if now == "between":
            raise Accident
    window.step()
    yield "stepped"


@given(
    sizes=st.lists(st.integers(1, 4), min_size=4, max_size=12),
    size=st.integers(1, 3),
    counted=st.booleans(),
    bf16=st.booleans(),
    plan=st.lists(
        st.tuples(st.sampled_from(ACCIDENTS), st.integers(0, 2)), min_size=12, max_size=12
    ),
    caught_inside=st.booleans(),
)
def test_after_any_accident_the_next_window_is_exact_and_nothing_ticked(
    *,
    sizes: list[int],
    size: int,
    counted: bool,
    bf16: bool,
    plan: list[tuple[str, int]],
    caught_inside: bool,
) -> None:
    generator = torch.Generator().manual_seed(len(sizes))
    stream = [
        (torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator))
        for n in sizes
    ]
    model = classifier(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    updater = ms.Updater(
        model, optimizer, schedule=scheduler, precision=ms.BF16() if bf16 else ms.FP32()
    )
    remaining = iter(stream)  # one pass, gone on with after whatever goes wrong
    accidents = iter(plan)
    num_applied = 0
    is_done = False
    while not is_done:
        count = ms.targets() if counted else None
        with contextlib.suppress(Accident, KeyboardInterrupt):
            for window in updater.windows(remaining, size=size, count=count):
                accident, at = next(accidents, ("none", 0))
                before = weights(model), optimizer.state_dict()["state"], updater.clock.step
                steps: list[str] = []
                try:
                    steps.extend(accident_in(updater, window, accident, at))
                except Accident:
                    if not caught_inside:
                        raise
                finally:
                    assert not torch.is_autocast_enabled("cpu")
                    if steps:
                        num_applied += 1
                        assert all(p.grad is not None for p in model.parameters())
                    else:
                        assert distance(weights(model), before[0]) == 0.0
                        assert updater.clock.step == before[2] == num_applied
                        assert scheduler.last_epoch == num_applied
            is_done = True
        if not is_done:
            assert all(p.grad is None for p in model.parameters())
    assert updater.clock.step == updater.clock.update == num_applied
    # And now, on purpose after all that: one exact window.
    probe = [(torch.ones(2, 4), torch.tensor([0, 1])), (torch.ones(3, 4), torch.tensor([2, 2, 1]))]
    expected_model = clone(model)
    expected_model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        loss = sum(loss_sum(expected_model, b) for b in probe) / 5
    assert isinstance(loss, Tensor)
    loss.backward()
    updater.update(
        probe, lambda m, b: ms.cross_entropy(m(b[0]), b[1]), count=ms.targets() if counted else None
    )
    tolerance = 2e-2 if bf16 else 1e-6
    assert distance(gradients(model), gradients(expected_model)) < tolerance


def test_the_mean_of_means_fails_where_sum_over_denominator_passes() -> None:
    """The control: the check above can tell them apart."""
    batches = [
        (torch.randn(2, 4, dtype=torch.float64), torch.tensor([0, 1])),
        (torch.randn(5, 4, dtype=torch.float64), torch.tensor([1, IGNORED, 2, 0, 1])),
    ]
    model = classifier()
    expected = full_batch_gradient(model, batches)
    model.zero_grad()
    for x, y in batches:
        (F.cross_entropy(model(x), y) / len(batches)).backward()
    assert distance(gradients(model), expected) > 1e-3
    resting(model).update(batches, loss_sum, count=ms.targets())
    assert distance(gradients(model), expected) < 1e-12
