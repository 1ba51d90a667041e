"""Lazy updates: nothing is read by the host, and all else is as the eager updater does it."""

import copy
import dataclasses
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from plain_loop import Pair, classifier, distance, gradients, loss_sum, num_targets, pairs, weights
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

import midstep as ms
from midstep.clip.rule import Rule
from midstep.gradients import unread_norms
from midstep.records import UnreadRecord

# What makes the host wait for a number or a shape that only the device knows.
READS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "unique", "masked_select")

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True, fused=True),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, fused=True),
    "SGD with momentum": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.1, momentum=0.9, dampening=0.1, fused=True
    ),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1, fused=True),
}


class Reads(TorchDispatchMode):
    """Counts the operations that need the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def spoilt(batch: Pair, value: float = math.nan) -> Pair:
    x = batch[0].clone()
    x[0, 0] = value
    return x, batch[1]


def windows_of(*bad: int, number: int = 8, dtype: torch.dtype = torch.float32) -> list[list[Pair]]:
    """Windows of three microbatches, some of which bring a nan in their second."""
    found = [pairs(3, 2, 4, dtype=dtype, seed=seed) for seed in range(number)]
    for position in bad:
        found[position][1] = spoilt(found[position][1])
    return found


def updater_of(name: str = "AdamW", dtype: torch.dtype = torch.float32, **stages: Any) -> Any:
    model = classifier(dtype)
    optimizer = OPTIMIZERS[name](model)
    stages.setdefault("clip", ms.ByGlobalNorm(0.5))
    return ms.Updater(model, optimizer, **stages)


def run(
    updater: ms.Updater, data: Sequence[Sequence[Pair]], *, counted: bool = True
) -> list[ms.UpdateRecord]:
    count = num_targets if counted else None

    def loss(model: nn.Module, batch: Pair) -> ms.LossSum:
        return ms.LossSum(loss_sum(model, batch), num_targets(batch))

    return [updater.update(window, loss, count=count) for window in data]


def told(records: Sequence[ms.UpdateRecord], *but: str) -> list[dict[str, Any]]:
    """What the records say, without times and without what a lazy one cannot know."""
    fields = {f.name for f in dataclasses.fields(ms.UpdateRecord)} - {"seconds", *but}
    return [{name: getattr(r, name) for name in fields} for r in records]


# -- nothing is read -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", [ms.FP32(), ms.BF16(), ms.FP16()], ids=repr)
@pytest.mark.parametrize("counted", [True, False])
def test_an_applied_update_of_which_nothing_is_read_has_no_host_sync(
    name: str, precision: Any, counted: bool
) -> None:
    model = classifier(torch.float32)
    optimizer = OPTIMIZERS[name](model)
    log: list[ms.UpdateRecord] = []
    updater = ms.Updater(
        model,
        optimizer,
        clip=ms.ByGlobalNorm(lambda step: 0.5 / (step + 1)),
        precision=precision,
        schedule=StepLR(optimizer, 1, 0.9),
        sinks=[log.append],
        lazy=True,
    )
    data = [batch for window in windows_of() for batch in window]
    # Counts are taken on the host, where a loader's batches are, so they are no part of it.
    counts = {id(x): int((y != -100).sum()) for x, y in data}
    reads = Reads()
    windows = updater.windows(
        data, size=3, count=(lambda batch: counts[id(batch[0])]) if counted else None
    )
    with reads:
        for number, window in enumerate(windows):
            for batch in window:
                with window.forward():
                    value = loss_sum(model, batch)
                window.backward(value, count=counts[id(batch[0])])
            window.step()
            if number == 0:
                reads.found.clear()  # SGD makes its momentum in an eager first update
            assert not reads.found
    assert [r.step for r in log] == list(range(1, 9))


def test_a_count_that_a_loss_carries_on_the_device_is_not_read() -> None:
    updater = updater_of(lazy=True)
    (window,) = windows_of(number=1)

    def loss(model: nn.Module, batch: Pair) -> ms.LossSum:
        return ms.cross_entropy(model(batch[0]), batch[1])

    counts = iter([num_targets(batch) for batch in window])
    with Reads() as reads:
        updater.update(window, loss, count=lambda _: next(counts))
    assert not reads.found
    assert updater.clock.step == 1


def test_the_eager_updater_is_the_default_on_cpu_and_reads() -> None:
    """The counter sees what it must: this is the loop above, not forced to be lazy."""
    updater = updater_of()
    with Reads() as reads:
        (record,) = run(updater, windows_of(number=1))
    assert reads.found["_local_scalar_dense"] > 0
    assert type(record) is ms.UpdateRecord


# -- as the eager one ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [(), (2,), (0, 3, 4, 7)], ids=str)
@pytest.mark.parametrize("counted", [True, False])
def test_weights_state_and_records_are_those_of_the_eager_updater(
    name: str, dtype: torch.dtype, bad: tuple[int, ...], counted: bool
) -> None:
    ends = []
    for lazy in (False, True):
        updater = updater_of(name, dtype, nonfinite=ms.Skip(), lazy=lazy)
        updater.averaged_model = AveragedModel(updater.model)
        records = run(updater, windows_of(*bad, dtype=dtype), counted=counted)
        updater.settle()
        ends.append((updater, records))
    (eager, theirs), (lazy_one, ours) = ends
    close = 1e-5 if dtype is torch.float32 else 1e-11
    assert distance(weights(lazy_one.model), weights(eager.model)) < close
    assert distance(weights(lazy_one.averaged_model), weights(eager.averaged_model)) < close
    assert [r.verdict for r in ours] == [r.verdict for r in theirs]
    inexact = ("grad_norm", "clip_coefficient", "loss_mean", "loss_means", "num_nonfinite")
    assert told(ours, *inexact) == told(theirs, *inexact)
    for a, b in zip(ours, theirs, strict=True):
        for field in inexact[:3]:
            expected = getattr(b, field)
            if expected is None:
                assert getattr(a, field) is None
            else:
                assert getattr(a, field) == pytest.approx(expected, rel=close, nan_ok=True)
        assert (a.num_nonfinite > 0) == (b.num_nonfinite > 0)
    states = [u.optimizer.state_dict()["state"] for u in (lazy_one, eager)]
    for a, b in zip(
        *[[t for s in state.values() for t in s.values()] for state in states], strict=True
    ):
        assert (a is None and b is None) or distance([a], [b]) < close


@pytest.mark.parametrize("bad", [(), (1, 2), (5,)], ids=str)
def test_the_schedule_moves_with_applied_updates_only(bad: tuple[int, ...]) -> None:
    rates = []
    for lazy in (False, True):
        model = classifier(torch.float32)
        optimizer = OPTIMIZERS["AdamW"](model)
        schedule = StepLR(optimizer, 1, 0.5)
        updater = ms.Updater(model, optimizer, schedule=schedule, nonfinite=ms.Skip(), lazy=lazy)
        records = run(updater, windows_of(*bad))
        rates.append([r.lr for r in records])
    assert rates[0] == rates[1]


@pytest.mark.parametrize("bad", [(), (1, 2), (0, 5)], ids=str)
@pytest.mark.parametrize("scale", [2.0**-60, 1024.0, 2.0**127])
def test_the_loss_scale_moves_on_the_device_as_it_does_on_the_host(
    bad: tuple[int, ...], scale: float
) -> None:
    precision = ms.FP16(init_scale=scale, growth_interval=2)
    scales, ends = [], []
    for lazy in (False, True):
        updater = updater_of("SGD", precision=precision, nonfinite=ms.Skip(), lazy=lazy)
        records = run(updater, windows_of(*bad))
        scales.append([(r.loss_scale, r.verdict) for r in records])
        ends.append(updater.loss_scale.state_dict())
    assert scales[0] == scales[1]
    assert ends[0] == ends[1]


def test_a_window_is_scaled_by_what_its_record_says() -> None:
    """Also where the update before it overflowed and the host does not know yet."""
    precision = ms.FP16(init_scale=1024.0, growth_interval=2)
    updater = updater_of("SGD", precision=precision, nonfinite=ms.Skip(), lazy=True)
    data = [batch for window in windows_of(1, 2) for batch in window]
    used, records = [], []
    for window in updater.windows(data, size=3, count=num_targets):
        used.append(window.scale)
        records.append(updater.update(window, loss_sum))
    assert [float(scale) for scale in used] == [r.loss_scale for r in records]
    assert len(set(map(float, used))) > 2


def test_the_gradient_after_an_update_is_the_true_clipped_one() -> None:
    updater = updater_of(lazy=True, clip=ms.ByGlobalNorm(0.1))
    run(updater, windows_of(number=2))
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients(updater.model)))
    assert norm == pytest.approx(0.1, rel=1e-6)


# -- a bad update --------------------------------------------------------------------------------


def test_a_bad_update_raises_one_update_later_and_touches_nothing() -> None:
    updater = updater_of(lazy=True)
    good, bad, after = windows_of(1, number=3)
    run(updater, [good])
    updater.settle()
    before = weights(updater.model)
    state = copy.deepcopy(updater.optimizer.state_dict())
    (record,) = run(updater, [bad])
    with pytest.raises(
        ms.NonFiniteGradient, match=r"Update 2: .*microbatch 1.*one update later"
    ) as e:
        run(updater, [after])
    assert distance(weights(updater.model), before) == 0.0
    assert str(updater.optimizer.state_dict()) == str(state)
    assert (e.value.update, e.value.microbatch) == (2, 1)
    assert set(e.value.parameters) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert record.verdict is ms.Verdict.SKIPPED_NONFINITE
    assert updater.clock.update == 1
    (again,) = run(updater, [after])  # the run may go on from there
    assert (again.update, again.step) == (2, 2)


def test_reading_the_record_of_a_bad_update_raises_at_once() -> None:
    updater = updater_of(lazy=True)
    (record,) = run(updater, windows_of(0, number=1))
    with pytest.raises(ms.NonFiniteGradient):
        _ = record.grad_norm
    assert math.isnan(record.grad_norm or 0.0)


def test_the_end_of_a_pass_tells_of_its_last_update() -> None:
    updater = updater_of(lazy=True)
    data = [batch for window in windows_of(1, number=2) for batch in window]
    windows = updater.windows(data, size=3, count=num_targets)
    for _ in range(2):
        updater.update(next(windows), loss_sum)
    with pytest.raises(ms.NonFiniteGradient, match="Update 2"):
        next(windows)


def test_so_many_are_skipped_in_a_row_and_the_next_raises() -> None:
    updater = updater_of(lazy=True, nonfinite=ms.Skip(max_consecutive=2))
    run(updater, windows_of(0, 1, 2, number=3))
    with pytest.raises(ms.NonFiniteGradient, match="Update 3"):
        updater.settle()


def test_an_overflow_that_the_scale_explains_is_skipped_under_raise() -> None:
    updater = updater_of("SGD", precision=ms.FP16(init_scale=2.0**40), lazy=True)
    records = run(updater, windows_of(number=8))
    assert records[0].verdict is ms.Verdict.SKIPPED_NONFINITE
    assert records[1].loss_scale == 2.0**39


def test_a_first_update_that_is_bad_leaves_no_momentum_of_memory_nobody_wrote() -> None:
    """torch's fused SGD makes its buffers before it finds out that it must skip."""
    updater = updater_of("SGD with momentum", nonfinite=ms.Skip(), lazy=True)
    run(updater, windows_of(0, number=1))
    updater.settle()
    assert updater.optimizer.state_dict()["state"] == {}


def test_a_count_that_does_not_fit_is_told_late_and_not_stepped_on() -> None:
    updater = updater_of(lazy=True)
    (window,) = windows_of(number=1)
    before = weights(updater.model)

    def loss(model: nn.Module, batch: Pair) -> ms.LossSum:
        return ms.cross_entropy(model(batch[0]), batch[1])

    updater.update(window, loss, count=lambda batch: num_targets(batch) + 1)
    with pytest.raises(ms.CountMismatch):
        updater.settle()
    assert distance(weights(updater.model), before) == 0.0


# -- magnitudes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-35, -20, 0, 15, 25])
@pytest.mark.parametrize("size", [3, 20_000])
def test_gradients_of_any_magnitude_have_the_right_norm(exponent: int, size: int) -> None:
    grads = [torch.full((size,), 10.0**exponent), torch.full((2,), -(10.0**exponent))]
    expected = math.hypot(*[float(g[0]) * math.sqrt(len(g)) for g in grads])
    norms = unread_norms(grads)
    assert float(norms.norm()) == pytest.approx(expected, rel=1e-6)


def test_a_factor_that_the_kernel_cannot_take_changes_nothing_and_is_said() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    updater = ms.Updater(model, optimizer, clip=ms.ByGlobalNorm(1e-3), lazy=True)
    updater.update([torch.full((1, 1), 1e37)], lambda m, x: ms.LossSum(m(x).sum(), 1))
    with pytest.raises(ms.NonFiniteGradient, match=r"norm of 1e\+37"):
        updater.settle()


# -- records and sinks ---------------------------------------------------------------------------


def test_sinks_hear_of_each_update_once_in_order_and_one_later() -> None:
    heard: list[tuple[int, bool]] = []
    updater = updater_of(
        sinks=[lambda r: heard.append((r.update, r.applied))], nonfinite=ms.Skip(), lazy=True
    )
    lengths = []
    for window in windows_of(2, number=4):
        run(updater, [window])
        lengths.append(len(heard))
    updater.settle()
    updater.settle()
    assert heard == [(1, True), (2, True), (3, False), (4, True)]
    assert lengths == [0, 1, 2, 3]


def record_and_fields() -> Iterator[tuple[str, Callable[[ms.UpdateRecord], object]]]:
    yield "print", str
    yield "json", lambda r: ms.UpdateRecord.from_json(r.to_json()) == r
    yield "pickle", lambda r: pickle.loads(pickle.dumps(r)) == r
    yield "copy", lambda r: copy.deepcopy(r) == r
    yield "replace", lambda r: dataclasses.replace(r, update=r.update) == r
    yield "equal", lambda r: r == r
    yield "asdict", dataclasses.asdict


@pytest.mark.parametrize("way", dict(record_and_fields()).values(), ids=dict(record_and_fields()))
def test_an_unread_record_is_a_record(way: Callable[[ms.UpdateRecord], object]) -> None:
    updater = updater_of(lazy=True)
    (record,) = run(updater, windows_of(number=1))
    assert isinstance(record, UnreadRecord)
    assert way(record)
    assert record.applied
    with pytest.raises(AttributeError, match="no attribute `loss`"):
        _ = record.loss  # type: ignore[attr-defined]


def test_a_record_whose_updater_went_back_to_a_checkpoint_is_never_told() -> None:
    updater = updater_of(lazy=True)
    state = updater.state_dict()
    (record,) = run(updater, windows_of(number=1))
    updater.load_state_dict(state)
    assert updater.clock.update == 0
    with pytest.raises(AttributeError):
        _ = record.grad_norm


def test_the_state_of_a_run_holds_its_last_update() -> None:
    model = classifier(torch.float32)
    optimizer = OPTIMIZERS["AdamW"](model)
    updater = ms.Updater(model, optimizer, schedule=StepLR(optimizer, 1, 0.5), lazy=True)
    run(updater, windows_of(number=3))
    assert updater.state_dict()["clock"]["step"] == 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 8)


# -- beside observers ------------------------------------------------------------------------------


def test_observers_look_at_the_updates_that_are_due_and_the_others_are_not_read() -> None:
    observers = [ms.observers.GradNorms(every=3), ms.observers.Updates(every=2)]
    updater = updater_of(observers=observers, lazy=True)
    kinds, records = [], []
    counts = {id(x): num_targets((x, y)) for window in windows_of() for x, y in window}
    for window in windows_of():
        counts.update({id(x): num_targets((x, y)) for x, y in window})
        with Reads() as reads:
            record = updater.update(window, loss_sum, count=lambda batch: counts[id(batch[0])])
        kinds.append((type(record) is UnreadRecord, not reads.found))
        records.append(record)
    due = [update % 3 == 0 or update % 2 == 0 for update in range(1, 9)]
    assert kinds == [(not is_due, not is_due) for is_due in due]
    for number, record in enumerate(records, start=1):
        assert ("grad_norms" in record.extra) == (number % 3 == 0)
        assert ("update_norms" in record.extra) == (number % 2 == 0)


@pytest.mark.parametrize("bad", [(), (1, 3)], ids=str)
def test_with_observers_weights_and_records_are_those_of_the_eager_updater(
    bad: tuple[int, ...],
) -> None:
    ends = []
    for lazy in (False, True):
        observers = [ms.observers.GradNorms(every=3), ms.observers.Moments(every=2)]
        updater = updater_of(observers=observers, nonfinite=ms.Skip(), lazy=lazy)
        records = run(updater, windows_of(*bad))
        updater.settle()
        ends.append((weights(updater.model), [r.update for r in records], records))
    (theirs, numbers, eager), (ours, own_numbers, late) = ends
    assert own_numbers == numbers
    assert distance(ours, theirs) < 1e-5
    assert [sorted(r.extra) for r in late] == [sorted(r.extra) for r in eager]
    assert [r.verdict for r in late] == [r.verdict for r in eager]


def test_a_count_that_does_not_fit_is_refused_in_an_update_that_is_looked_at() -> None:
    updater = updater_of(lazy=True, observers=[ms.observers.GradNorms()])
    (window,) = windows_of(number=1)
    before = weights(updater.model)

    def loss(model: nn.Module, batch: Pair) -> ms.LossSum:
        return ms.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(ms.CountMismatch):
        updater.update(window, loss, count=lambda batch: num_targets(batch) + 1)
    assert distance(weights(updater.model), before) == 0.0


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        ({"clip": ms.ByTensorNorm(1.0)}, "ByTensorNorm.*decides on the host"),
        ({"clip": ms.ByGlobalNorm(1.0, p=3.0)}, "ByGlobalNorm.*decides on the host"),
        ({"nonfinite": ms.Skip(every_microbatch=True)}, "after every microbatch"),
    ],
)
def test_a_stage_that_needs_the_host_is_refused(stages: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        updater_of(lazy=True, **stages)


def test_an_optimizer_that_cannot_skip_on_the_device_is_refused() -> None:
    model = classifier(torch.float32)
    with pytest.raises(ValueError, match=r"no kernel that skips.*fused=True"):
        ms.Updater(model, torch.optim.AdamW(model.parameters()), lazy=True)


def test_a_rule_of_ones_own_may_decide_on_the_device() -> None:
    class Halved(ms.ByGlobalNorm):
        def decide_unread(self, norm: Tensor, step: int) -> tuple[Tensor, float]:
            return torch.full_like(norm, 0.5), 1.0

    rule: Rule = Halved(1.0)
    updater = updater_of(lazy=True, clip=rule)
    (record,) = run(updater, windows_of(number=1))
    assert record.clip_coefficient == 0.5


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", [ms.FP32(), ms.FP16()], ids=repr)
def test_on_a_gpu_lazy_is_the_default_and_waits_for_nothing(precision: Any) -> None:
    model = classifier(torch.float32).cuda()
    optimizer = OPTIMIZERS["AdamW"](model)
    updater = ms.Updater(model, optimizer, clip=ms.ByGlobalNorm(0.5), precision=precision)
    data = [[(x.cuda(), y.cuda()) for x, y in window] for window in windows_of()]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        records = [updater.update(window, loss_sum, count=lambda _: 3) for window in data]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert isinstance(records[-1], UnreadRecord)
    assert records[-1].step == len(data)
