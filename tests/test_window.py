"""The two doors of a window, and every way to misuse them."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_loop import (
    Pair,
    classifier,
    distance,
    full_batch_gradient,
    gradients,
    loss_sum,
    masked,
    num_targets,
    pairs,
    true_gradient,
    weights,
)
from torch import Tensor, nn

import midstep as ms

BATCHES = pairs(3, 2, 4)


def resting(model: nn.Module, **settings: Any) -> ms.Updater:
    """An updater whose steps change nothing, so that the gradient stays to be looked at."""
    return ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.0), **settings)


def opened(updater: ms.Updater, batches: list[Pair] = BATCHES, **settings: Any) -> ms.Window[Pair]:
    """A window, kept open by the iterator that is kept on it."""
    windows = updater.windows(batches, **({"size": len(batches)} | settings))
    window = next(iter(windows))
    KEPT.append(windows)
    return window


def sum_of(model: nn.Module, batches: list[Pair]) -> Tensor:
    return torch.stack([loss_sum(model, batch) for batch in batches]).sum()


KEPT: list[Any] = []  # iterators whose end would drop the window a test is about


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    KEPT.clear()


# -- the doors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("with_forward", [True, False])
def test_a_hand_written_loop_gives_the_full_batch_gradient(
    counted: bool, with_forward: bool
) -> None:
    model = classifier()
    updater = resting(model)
    for window in updater.windows(BATCHES, size=3, count=ms.targets() if counted else None):
        for index, batch in enumerate(window):
            assert window.index == index
            assert window.is_last is (index == 2)
            if with_forward:
                with window.forward():
                    value = loss_sum(model, batch)
            else:
                value = loss_sum(model, batch)
            window.backward(value, count=None if counted else num_targets(batch))
        record = window.step()
    assert record.denominators == {"loss": sum(map(num_targets, BATCHES))}
    assert distance(gradients(model), full_batch_gradient(model, BATCHES)) < 1e-12


def test_a_list_of_microbatches_is_a_window_too() -> None:
    model = classifier()
    resting(model).update(BATCHES, loss_sum, count=ms.targets())
    assert distance(gradients(model), full_batch_gradient(model, BATCHES)) < 1e-12


def test_a_list_without_a_count_is_streamed_by_what_the_losses_carry() -> None:
    model = classifier()
    resting(model).update(BATCHES, lambda m, b: ms.cross_entropy(m(b[0]), b[1]))
    assert distance(gradients(model), full_batch_gradient(model, BATCHES)) < 1e-12


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("precision", [ms.FP32(), ms.FP16(init_scale=2.0**10)])
def test_gradients_brings_the_true_gradient_before_the_step(counted: bool, precision: Any) -> None:
    model = classifier(torch.float32)
    before = weights(model)
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=1.0), precision=precision)
    batches = pairs(3, 2, 4, dtype=torch.float32)
    window = opened(updater, batches, count=ms.targets() if counted else None)
    for batch in window:
        with window.forward():
            value = ms.cross_entropy(model(batch[0]), batch[1])
        window.backward(value)
    window.gradients_()
    tolerance = 1e-6 if isinstance(precision, ms.FP32) else 5e-3
    assert distance(gradients(model), full_batch_gradient(model, batches)) < tolerance
    window.gradients_()  # again: nothing is left to bring
    assert distance(gradients(model), full_batch_gradient(model, batches)) < tolerance
    for p in model.parameters():
        assert p.grad is not None
        p.grad.fill_(0.25)
    window.step()  # and the step goes on from what it finds there
    assert distance(weights(model), [w - 0.25 for w in before]) < 1e-7


def test_a_microbatch_may_be_left_out_of_a_streamed_window() -> None:
    model = classifier()
    updater = resting(model)
    for window in updater.windows(BATCHES, size=3):
        for batch in window:
            if window.index == 1:
                continue
            window.backward(loss_sum(model, batch), count=num_targets(batch))
        window.step()
    kept = [BATCHES[0], BATCHES[2]]
    assert distance(gradients(model), full_batch_gradient(model, kept)) < 1e-12


def test_a_streamed_window_ended_early_is_exact_over_what_it_saw_and_the_next_goes_on() -> None:
    model = classifier()
    updater = resting(model)
    records = []
    for window in updater.windows(pairs(3, 2, 4, 1), size=3):
        for batch in window:
            window.backward(loss_sum(model, batch), count=num_targets(batch))
            if window.index == 1:
                break
        records.append(window.step())
    assert [r.num_microbatches for r in records] == [2, 2]
    assert distance(gradients(model), full_batch_gradient(model, pairs(3, 2, 4, 1)[2:])) < 1e-12


def test_the_running_sum_of_a_streamed_window_stays_near_the_true_gradient() -> None:
    """The provisional divisor is a power of two, so what it leaves is exact, and small."""
    model = classifier(torch.float32)
    updater = resting(model)
    batches = [(1e3 * torch.randn(512, 4), torch.randint(3, (512,))) for _ in range(4)]
    window = opened(updater, batches)
    for batch in window:
        window.backward(loss_sum(model, batch), count=512)
    true = true_gradient(model, lambda m: sum_of(m, batches) / 2048)
    for grad, expected in zip(gradients(model), true, strict=True):
        assert torch.allclose(grad, expected, rtol=1e-3, atol=1e-4)
    window.step()


# -- nothing to count ----------------------------------------------------------------------------


def mean_reduced(model: nn.Module, batch: Pair) -> ms.LossSum:
    """What a model with a mean loss inside returns: 0/0 where nothing is supervised."""
    return ms.LossSum.from_mean(F.cross_entropy(model(batch[0]), batch[1]), num_targets(batch))


def sum_reduced(model: nn.Module, batch: Pair) -> ms.LossSum:
    return ms.LossSum(loss_sum(model, batch), num_targets(batch))


def hand_masked_mean(model: nn.Module, batch: Pair) -> ms.LossSum:
    x, y = batch
    mask = (y != -100).double()
    each = F.cross_entropy(model(x), y.clamp(min=0), reduction="none")
    return ms.LossSum.from_mean((each * mask).sum() / mask.sum(), mask.sum())


SPELLINGS = [mean_reduced, sum_reduced, hand_masked_mean]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_microbatch_without_targets_adds_nothing_and_no_nan(
    spelling: Callable[..., ms.LossSum], counted: bool, position: int
) -> None:
    model = classifier()
    batches = list(BATCHES)
    batches[position] = masked(batches[position])
    record = resting(model).update(batches, spelling, count=ms.targets() if counted else None)
    assert record.verdict == "applied"
    assert record.loss_mean is not None
    assert record.loss_mean == pytest.approx(
        F.cross_entropy(
            model(torch.cat([b[0] for b in batches])), torch.cat([b[1] for b in batches])
        ).item()
    )
    assert distance(gradients(model), full_batch_gradient(model, batches)) < 1e-12


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("counted", [True, False])
def test_a_window_without_targets_is_refused_and_nothing_moves(
    spelling: Callable[..., ms.LossSum], counted: bool
) -> None:
    model = classifier()
    updater = ms.Updater(model, torch.optim.AdamW(model.parameters()))
    before = weights(model)
    with pytest.raises(ms.EmptyWindow, match="nothing was counted in 3 microbatches"):
        updater.update(
            [masked(b) for b in BATCHES], spelling, count=ms.targets() if counted else None
        )
    assert distance(weights(model), before) == 0.0
    assert (updater.clock.update, updater.clock.step) == (0, 0)
    assert not updater.optimizer.state
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("where", ["updater", "windows"])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("counted", [True, False])
def test_a_window_without_targets_may_be_skipped_without_step_tick_or_scale_change(
    where: str, spelling: Callable[..., ms.LossSum], counted: bool
) -> None:
    model = classifier(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    skip = ms.Skip()
    updater = ms.Updater(
        model,
        optimizer,
        schedule=scheduler,
        precision=ms.FP16(init_scale=8.0, growth_interval=1),
        empty=skip if where == "updater" else None,
    )
    before = weights(model)
    batches = [masked(b) for b in pairs(3, 2, dtype=torch.float32)]
    windows = updater.windows(
        batches,
        size=2,
        count=ms.targets() if counted else None,
        empty=skip if where == "windows" else None,
    )
    (record,) = [updater.update(window, spelling) for window in windows]
    assert record.verdict == "skipped_empty"
    assert (record.loss_mean, record.grad_norm, record.loss_means) == (None, None, {"loss": None})
    assert (record.update, record.step, scheduler.last_epoch) == (1, 0, 0)
    assert updater.loss_scale.value == 8.0
    assert distance(weights(model), before) == 0.0
    assert not optimizer.state


def test_a_loop_that_skips_every_microbatch_of_an_empty_counted_window_may_end_it() -> None:
    model = classifier()
    updater = resting(model, empty=ms.Skip())
    window = opened(updater, [masked(b) for b in BATCHES], count=ms.targets())
    for batch in window:
        if not num_targets(batch):
            continue
    assert window.step().verdict == "skipped_empty"


def test_a_term_that_counts_nothing_leaves_the_others_exact() -> None:
    model = classifier()
    record = resting(model).update(
        BATCHES,
        lambda m, b: {"main": loss_sum(m, b), "aux": m(b[0]).sum() * float("nan")},
        count=lambda b: {"main": num_targets(b), "aux": 0},
    )
    assert record.loss_means["aux"] is None
    assert distance(gradients(model), full_batch_gradient(model, BATCHES)) < 1e-12


def test_a_term_may_be_left_out_where_it_counts_nothing() -> None:
    model = classifier()

    def loss(m: nn.Module, b: Pair) -> dict[str, Tensor]:
        terms = {"main": loss_sum(m, b)}
        if len(b[0]) == 2:
            terms["aux"] = m(b[0]).square().sum()
        return terms

    def count(b: Pair) -> dict[str, float]:
        return {"main": num_targets(b), "aux": b[0].numel() if len(b[0]) == 2 else 0}

    def mean_of(m: nn.Module) -> Tensor:
        main = sum_of(m, BATCHES) / sum(map(num_targets, BATCHES))
        aux = m(BATCHES[1][0]).square().sum() / BATCHES[1][0].numel()
        return main + aux

    resting(model).update(BATCHES, loss, count=count)
    assert distance(gradients(model), true_gradient(model, mean_of)) < 1e-12


# -- misuse --------------------------------------------------------------------------------------


def each(window: ms.Window[Pair], act: Callable[[Pair], None]) -> None:
    for batch in window:
        act(batch)


def test_backward_twice_for_one_microbatch_is_refused() -> None:
    model = classifier()
    window = opened(resting(model))

    def twice(batch: Pair) -> None:
        window.backward(loss_sum(model, batch), count=2)
        window.backward(loss_sum(model, batch), count=2)

    with pytest.raises(ms.WindowError, match="ran twice for term `loss` of microbatch 0"):
        each(window, twice)


def test_backward_before_the_loop_is_refused() -> None:
    model = classifier()
    window = opened(resting(model))
    with pytest.raises(ms.WindowError, match="outside the loop"):
        window.backward(loss_sum(model, BATCHES[0]), count=2)


def test_backward_after_gradients_is_refused() -> None:
    model = classifier()
    window = opened(resting(model))

    def settle(batch: Pair) -> None:
        window.backward(loss_sum(model, batch), count=2)
        window.gradients_()

    with pytest.raises(ms.WindowError, match=r"after `gradients_\(\)`"):
        each(window, settle)


def test_step_without_backward_is_refused() -> None:
    window = opened(resting(classifier()))
    with pytest.raises(ms.WindowError, match="no backward ran in this window"):
        window.step()


def acts(window: ms.Window[Pair], act: str) -> Callable[[], object]:
    loss = torch.zeros((), requires_grad=True) * 1.0
    return {
        "step": window.step,
        "gradients_": window.gradients_,
        "backward": lambda: window.backward(loss, count=2),
    }[act]


ACTS = ["step", "gradients_", "backward"]


@pytest.mark.parametrize("act", ACTS)
def test_a_window_that_was_stepped_takes_no_more(act: str) -> None:
    model = classifier()
    window = opened(resting(model))
    each(window, lambda batch: window.backward(loss_sum(model, batch), count=2))
    window.step()
    with pytest.raises(ms.WindowError, match="has ended"):
        acts(window, act)()
    assert len(gradients(model)) == 4  # what the step left is not disturbed


@pytest.mark.parametrize("act", ACTS)
def test_a_window_that_was_dropped_takes_no_more(act: str) -> None:
    updater = resting(classifier())
    first = opened(updater)
    opened(updater)
    with pytest.raises(ms.WindowError, match="has ended"):
        acts(first, act)()


@pytest.mark.parametrize(
    ("counted", "message"), [(True, "Microbatch 0 was counted"), (False, "ran twice")]
)
def test_a_window_made_a_list_and_looped_over_later_is_refused(counted: bool, message: str) -> None:
    model = classifier()
    window = opened(resting(model), count=ms.targets() if counted else None)
    batches: Any = list(window)
    with pytest.raises(ms.WindowError, match=message):
        each(batches, lambda b: window.backward(loss_sum(model, b), count=num_targets(b)))


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_a_counted_microbatch_that_is_skipped_is_refused(skipped: int) -> None:
    model = classifier()
    window = opened(resting(model), count=ms.targets())

    def run() -> None:
        for batch in window:
            if window.index == skipped:
                continue
            window.backward(loss_sum(model, batch))
        window.step()

    with pytest.raises(ms.WindowError, match=f"Microbatch {skipped} was counted"):
        run()


def test_a_counted_window_ended_early_is_refused() -> None:
    model = classifier()
    window = opened(resting(model), count=ms.targets())
    for batch in window:
        window.backward(loss_sum(model, batch))
        break
    with pytest.raises(ms.WindowError, match="Microbatch 1 was counted"):
        window.step()


def test_terms_in_a_streamed_window_are_refused() -> None:
    with pytest.raises(ms.WindowError, match="Count the window ahead"):
        resting(classifier()).update(BATCHES, lambda m, b: {"a": loss_sum(m, b)})


@pytest.mark.parametrize(
    "loss", [lambda m, b: {"main": loss_sum(m, b), "other": loss_sum(m, b)}, loss_sum]
)
def test_terms_that_were_not_counted_are_refused(loss: Callable[..., Any]) -> None:
    count = lambda b: {"main": num_targets(b), "aux": 1}  # noqa: E731
    with pytest.raises(ms.WindowError, match="the window counted \\['aux', 'main'\\]"):
        resting(classifier()).update(BATCHES, loss, count=count)


def test_a_term_that_was_counted_and_never_comes_is_refused() -> None:
    count = lambda b: {"main": num_targets(b), "aux": 1}  # noqa: E731
    with pytest.raises(ms.WindowError, match="Microbatch 0 was counted for `aux`"):
        resting(classifier()).update(BATCHES, lambda m, b: {"main": loss_sum(m, b)}, count=count)


def test_a_streamed_loss_without_a_count_is_refused() -> None:
    with pytest.raises(ms.WindowError, match="without a count"):
        resting(classifier()).update(BATCHES, loss_sum)


@pytest.mark.parametrize("precision", [ms.BF16(), ms.FP16()])
@pytest.mark.parametrize("where", [0, 1])
def test_a_forward_outside_the_precision_that_was_asked_for_is_refused(
    precision: Any, where: int
) -> None:
    model = classifier(torch.float32)
    window = opened(resting(model, precision=precision), pairs(2, 2, dtype=torch.float32))

    def forget_once(batch: Pair) -> None:
        if window.index == where:
            value = loss_sum(model, batch)
        else:
            with window.forward():
                value = loss_sum(model, batch)
        window.backward(value, count=2)

    with pytest.raises(ms.WindowError, match=r"without `with window\.forward\(\):`"):
        each(window, forget_once)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: m(b[0]), r"shape \[3, 3\]"),
        (lambda m, b: loss_sum(m, b).detach(), "no graph"),
        (lambda m, b: loss_sum(m, b).item(), "is a `float`"),
        (lambda *_: None, "is a `NoneType`"),
        (lambda m, b: m(b[0]).sum().to(torch.complex128), "complex128"),
    ],
)
def test_what_is_no_loss_sum_is_refused(loss: Callable[..., Any], message: str) -> None:
    with pytest.raises(ms.WindowError, match=message):
        resting(classifier()).update(BATCHES, loss, count=ms.targets())


def test_a_loss_of_shape_one_is_taken() -> None:
    model = classifier()
    resting(model).update(BATCHES, lambda m, b: loss_sum(m, b).view(1), count=ms.targets())
    assert distance(gradients(model), full_batch_gradient(model, BATCHES)) < 1e-12


def test_a_count_beside_a_window_that_has_its_own_is_refused() -> None:
    updater = resting(classifier())
    window = opened(updater)
    with pytest.raises(ValueError, match="has its counts already"):
        updater.update(window, loss_sum, count=ms.targets())


def test_a_loss_that_reaches_no_parameter_of_the_optimizer_is_refused() -> None:
    other = torch.zeros((), dtype=torch.float64, requires_grad=True)
    with pytest.raises(ms.WindowError, match="No parameter of the optimizer got a gradient"):
        resting(classifier()).update(BATCHES, lambda *_: other * 1.0, count=ms.targets())


@pytest.mark.parametrize("act", ACTS)
def test_an_error_that_is_swallowed_still_drops_the_window(act: str) -> None:
    """A half-made gradient must not be stepped on by a loop that catches too much."""
    model = classifier()
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = weights(model)
    window = opened(updater, count=ms.targets())
    for batch in window:
        window.backward(loss_sum(model, batch))
        if window.index == 1:
            break
    with pytest.raises(ms.WindowError, match=r"twice|Microbatch 2 was counted"):
        acts(window, act)()
    assert gradients(model) == []
    with pytest.raises(ms.WindowError, match="has ended"):
        window.step()
    assert distance(weights(model), before) == 0.0
    updater.update(BATCHES, loss_sum, count=ms.targets())  # and the next is exact
    expected = [w - g for w, g in zip(before, gradients(model), strict=True)]
    assert distance(weights(model), expected) < 1e-12


def test_a_backward_that_fails_and_is_swallowed_drops_the_window() -> None:
    model = classifier()
    window = opened(resting(model))
    values = []
    for batch in window:
        values.append(loss_sum(model, batch))
        if window.index == 0:
            window.backward(values[0], count=num_targets(batch))
            continue
        with pytest.raises(RuntimeError, match="second time"):
            window.backward(values[0], count=num_targets(batch))  # its graph is gone
        break
    with pytest.raises(ms.WindowError, match="has ended"):
        window.step()
    assert gradients(model) == []


# -- checks between loss and count ---------------------------------------------------------------


@pytest.mark.parametrize("off", [1, -1])
@pytest.mark.parametrize("size", [3, 5_000_000])
def test_a_whole_count_that_is_off_by_one_is_found(off: int, size: int) -> None:
    updater = resting(classifier())

    def loss(m: nn.Module, b: Pair) -> ms.LossSum:
        return ms.LossSum(loss_sum(m, b), size + off)

    with pytest.raises(ms.CountMismatch) as caught:
        updater.update(BATCHES[:1], loss, count=lambda _: size)
    error = caught.value
    assert (error.term, error.counted, error.carried) == ("loss", size, size + off)


def test_a_count_passed_beside_a_loss_that_carries_another_is_found() -> None:
    model = classifier()
    window = opened(resting(model))
    with pytest.raises(ms.CountMismatch, match=r"over 5.*found 4"):
        each(window, lambda b: window.backward(ms.LossSum(loss_sum(model, b), 5), count=4))


def test_sums_of_weights_may_differ_by_rounding() -> None:
    weight = torch.rand(3)
    batch = torch.randn(4_000, 4), torch.randint(3, (4_000,))

    def loss(m: nn.Module, b: Pair) -> ms.LossSum:
        total = F.cross_entropy(m(b[0]), b[1], weight=weight, reduction="sum")
        return ms.LossSum(total, weight[b[1]].sum())

    model = classifier(torch.float32)
    assert resting(model).update([batch], loss, count=ms.targets(weight=weight)).applied


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf"), True, "3", None, 1 + 2j])
def test_what_is_no_count_is_refused(count: Any) -> None:
    with pytest.raises(ms.WindowError, match="count of `loss` is"):
        resting(classifier()).update(BATCHES, loss_sum, count=lambda _: count)


@pytest.mark.parametrize("count", [2, 2.0, torch.tensor(2), torch.tensor(2.0)])
def test_a_count_may_be_a_number_or_a_tensor(count: Any) -> None:
    model = classifier()
    record = resting(model).update(BATCHES, loss_sum, count=lambda _: count)
    assert record.denominators == {"loss": 6}
    expected = true_gradient(model, lambda m: sum_of(m, BATCHES) / 6)
    assert distance(gradients(model), expected) < 1e-12


# -- memory --------------------------------------------------------------------------------------


class _Watched(torch.Tensor):
    """Tensors of a class of our own take weak references that end with them."""


class _Token:
    """What a graph node holds on to."""


class _Marked(torch.autograd.Function):
    """An identity that leaves a token in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: _Token) -> Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Witness:
    """Feeds batches and takes losses, and remembers them weakly."""

    def __init__(self, *, raises: bool) -> None:
        self.raises = raises
        self.seen: list[weakref.ref[Any]] = []

    def batches(self) -> Iterator[Pair]:
        for x, y in pairs(3, 2, 4, 1):
            yield self._watched(x), y  # and no name for it in a frame that lives on

    def _watched(self, x: Tensor) -> Tensor:
        watched = x.as_subclass(_Watched)
        self.seen.append(weakref.ref(watched))
        return watched

    def loss(self, model: nn.Module, batch: Pair) -> ms.LossSum:
        token = _Token()
        self.seen.append(weakref.ref(token))
        scores = _Marked.apply(model(batch[0].as_subclass(torch.Tensor)), token)
        if self.raises and len(self.seen) > 4:
            raise ZeroDivisionError
        value = F.cross_entropy(scores, batch[1], reduction="sum")
        return ms.LossSum(value, num_targets(batch))

    @property
    def alive(self) -> list[Any]:
        return [ref() for ref in self.seen if ref() is not None]


def run_through(
    updater: ms.Updater, witness: _Witness, *, counted: bool, door: str
) -> ms.Window[Pair] | None:
    last = None
    count = ms.targets() if counted else None
    for window in updater.windows(witness.batches(), size=4, count=count):
        last = window
        if door in {"update", "raise in update"}:
            updater.update(window, witness.loss)
            continue
        for batch in window:
            window.backward(witness.loss(updater.model, batch))
            if door == "break":
                return last
        window.step()
    return last


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("door", ["update", "raise in update", "loop", "break", "raise in loop"])
def test_no_microbatch_and_no_graph_outlives_its_window(counted: bool, door: str) -> None:
    """Without the garbage collector: no cycle holds them, nor does the window that is kept."""
    witness = _Witness(raises=door.startswith("raise"))
    updater = resting(classifier())
    gc.collect()
    gc.disable()
    try:
        window = None
        with contextlib.suppress(ZeroDivisionError):
            window = run_through(updater, witness, counted=counted, door=door)
        assert len(witness.seen) >= 2
        # A pass that is left halfway keeps the one batch that it has read ahead.
        is_left = not counted and door not in {"update", "loop"}
        assert len(witness.alive) == is_left
        assert not any(isinstance(thing, _Token) for thing in witness.alive)
        assert (window is None) is door.startswith("raise")
    finally:
        gc.enable()
