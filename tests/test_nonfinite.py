"""What is not finite is never stepped on: it leaves no trace, and says where it came from."""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_loop import Pair, classifier, distance, gradients, loss_sum, pairs, weights
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import midstep as ms

INF, NAN = math.inf, math.nan
GOOD = pairs(3, 2, 4, dtype=torch.float32)
LABELS = torch.tensor([0, 1])


def bad(value: float = INF) -> Pair:
    return torch.full((2, 4), value), LABELS


def bits(value: object) -> object:
    """Anything, in a form whose equality is that of every bit."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


def trace_of(updater: ms.Updater) -> object:
    """Everything that a window that was not stepped must leave alone."""
    return bits(
        [
            updater.model.state_dict(),
            updater.optimizer.state_dict(),
            updater.rates.state_dict(),
            updater.loss_scale.state_dict(),
            updater.clip.state_dict(),
        ]
    )


def trained(**settings: Any) -> ms.Updater:
    """An updater some updates into its run, so that there is a state to be spoilt."""
    model = classifier(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    updater = ms.Updater(model, optimizer, schedule=StepLR(optimizer, 1, 0.9), **settings)
    for _ in range(3):
        updater.update(GOOD, loss_sum, count=ms.targets())
    return updater


# -- Raise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("precision", [ms.FP32(), ms.BF16(), ms.FP16(init_scale=2.0)])
def test_raising_leaves_every_bit_and_names_parameters_and_microbatch(
    value: float, position: int, counted: bool, precision: Any
) -> None:
    updater = trained(precision=precision)
    before, clock = trace_of(updater), copy.copy(updater.clock)
    batches = list(GOOD)
    batches[position] = bad(value)
    with pytest.raises(ms.NonFiniteGradient) as caught:
        updater.update(
            batches,
            lambda m, b: ms.cross_entropy(m(b[0]), b[1]),
            count=ms.targets() if counted else None,
        )
    assert trace_of(updater) == before
    assert updater.clock == clock
    assert gradients(updater.model) == []
    error = caught.value
    assert error.microbatch == position
    assert error.update == 4
    assert error.parameters["0.weight"] == 24
    assert set(error.parameters) <= {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert f"microbatch {position} of the window" in str(error)
    assert "`0.weight` (24)" in str(error)
    record = updater.update(GOOD, loss_sum, count=ms.targets())
    assert (record.update, record.step) == (4, 4)


@pytest.mark.parametrize("counted", [True, False])
def test_microbatches_that_count_nothing_keep_their_place(counted: bool) -> None:
    nothing = (GOOD[0][0], torch.full_like(GOOD[0][1], -100))
    with pytest.raises(ms.NonFiniteGradient) as caught:
        trained().update(
            [nothing, GOOD[1], nothing, bad(), GOOD[2]],
            lambda m, b: ms.cross_entropy(m(b[0]), b[1]),
            count=ms.targets() if counted else None,
        )
    assert caught.value.microbatch == 3


def test_the_number_of_entries_is_that_of_each_parameter() -> None:
    model = nn.ParameterDict({"a": torch.ones(5), "b": torch.ones(2), "c": torch.ones(3)})
    scale = {"a": torch.tensor([1.0, INF, NAN, 1.0, -INF]), "b": torch.ones(2)}
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def loss(m: nn.ParameterDict, _: Tensor) -> Tensor:
        finite = sum(
            (m[name] * torch.nan_to_num(s, 0.0, 0.0, 0.0)).sum() for name, s in scale.items()
        )
        for name, s in scale.items():  # so that the loss is finite and the gradient is not
            m[name].register_hook(lambda grad, s=s: grad * s)
        return finite + m["c"].sum()

    with pytest.raises(ms.NonFiniteGradient) as caught:
        updater.update([torch.ones(1)], loss, count=ms.rows())
    assert caught.value.parameters == {"a": 3}


class Fragile(nn.Module):
    """The root at 0: the value is finite and the slope is not. Whether it is taken is chance."""

    def __init__(self, chance: float = 0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.norm = nn.BatchNorm1d(2)
        self.dropout = nn.Dropout(0.5)
        self.chance = chance
        self.drawn: list[float] = []
        self.taken: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        drawn = float(self.dropout(torch.ones(64)).sum()) / 2 / 64  # a dropout's draw, near 1/2
        self.drawn.append(drawn)
        is_taken = drawn + float(x[0, 0]) > self.chance + 0.5
        self.taken.append(is_taken)
        value = self.weight.sqrt().sum() if is_taken else self.weight.sum()
        return value + self.norm(x).sum() * 0.1


class Draws:
    """A pass that draws from torch's stream for each batch, as augmentation does."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.num):
            yield torch.rand(4, 2) * 0.2


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("counted", [True, False])
def test_a_window_is_run_again_with_the_same_draws_to_find_who_broke_it(
    seed: int, counted: bool
) -> None:
    model = Fragile(chance=0.15)
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.0))
    torch.manual_seed(seed)
    found = None
    loss: Callable[..., Any] = lambda m, x: ms.LossSum(m(x), len(x))  # noqa: E731
    try:
        for window in updater.windows(Draws(12), size=6, count=ms.rows() if counted else None):
            model.taken.clear()
            model.drawn.clear()
            updater.update(window, loss)
    except ms.NonFiniteGradient as error:
        found = error.microbatch
    first = model.taken[:6]
    assert found == (first.index(True) if True in first else None)
    assert any(model.taken) is (found is not None)
    if found is not None:  # it ran again up to the culprit and no further, alike
        assert model.drawn[6:] == model.drawn[: found + 1]


@pytest.mark.parametrize("counted", [True, False])
def test_running_again_disturbs_neither_buffers_nor_random_streams(counted: bool) -> None:
    """Against a twin that skips, and so never runs a window again."""

    def after(policy: Any) -> tuple[object, object]:
        torch.manual_seed(1)
        model = Fragile(chance=-9.0)
        updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), nonfinite=policy)
        batches = [torch.rand(4, 2) for _ in range(3)]
        raised = False
        try:
            updater.update(
                batches,
                lambda m, x: ms.LossSum(m(x), len(x)),
                count=ms.rows() if counted else None,
            )
        except ms.NonFiniteGradient:
            raised = True
        assert raised is isinstance(policy, ms.Raise)
        assert len(model.taken) == (4 if raised else 3)
        return bits(model.state_dict()), bits(torch.get_rng_state())

    assert after(ms.Raise()) == after(ms.Skip())


def fragile_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Finite in value; not in slope for batches of ones."""
    weight = next(model.parameters())
    return (weight * 0.0).abs().sqrt().sum() if batch[0, 0] == 1 else (weight.sum() * batch).sum()


def hand_written(updater: ms.Updater, batches: list[Tensor]) -> ms.UpdateRecord:
    for window in updater.windows(batches, size=len(batches)):
        for batch in window:
            window.backward(fragile_loss(updater.model, batch), count=len(batch))
        return window.step()
    raise AssertionError


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_look_after_each_backward_finds_it_in_a_hand_written_loop(position: int) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.zeros(2, 2) for _ in range(3)]
    batches[position] = torch.ones(2, 2)
    looking = ms.Updater(model, optimizer, nonfinite=ms.Raise(every_microbatch=True))
    with pytest.raises(ms.NonFiniteGradient) as caught:
        hand_written(looking, batches)
    assert caught.value.microbatch == position
    with pytest.raises(ms.NonFiniteGradient, match="every loss was finite") as caught:
        hand_written(ms.Updater(model, optimizer), batches)
    assert caught.value.microbatch is None


def test_a_look_that_found_it_goes_before_a_later_loss_that_shows_it() -> None:
    model = nn.Linear(2, 1)
    updater = ms.Updater(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nonfinite=ms.Raise(every_microbatch=True),
    )
    batches = [torch.zeros(2, 2), torch.ones(2, 2), torch.full((2, 2), INF)]
    with pytest.raises(ms.NonFiniteGradient) as caught:
        hand_written(updater, batches)
    assert caught.value.microbatch == 1


def test_a_gradient_the_user_spoilt_before_the_step_is_seen() -> None:
    model = classifier(torch.float32)
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = weights(model)
    window = next(windows := updater.windows(GOOD, size=3))
    for batch in window:
        window.backward(loss_sum(model, batch), count=len(batch[0]))
    window.gradients_()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.view(-1)[0] = NAN
    with pytest.raises(ms.NonFiniteGradient) as caught:
        window.step()
    assert caught.value.parameters == {"0.weight": 1, "0.bias": 1, "2.weight": 1, "2.bias": 1}
    assert distance(weights(model), before) == 0.0
    windows.close()  # type: ignore[attr-defined]


def test_huge_and_tiny_finite_gradients_are_stepped_on() -> None:
    """Their squares leave float32, which once was taken for an infinite norm or none."""
    for magnitude in (1e25, 1e-25):
        model = nn.Linear(2, 1, bias=False)
        updater = ms.Updater(
            model, torch.optim.SGD(model.parameters(), lr=1.0), clip=ms.ByGlobalNorm(1e-30)
        )
        record = updater.update(
            [torch.full((1, 2), magnitude)], lambda m, x: m(x).sum(), count=ms.rows()
        )
        assert record.verdict == "applied"
        assert record.grad_norm == pytest.approx(magnitude * math.sqrt(2), rel=1e-6)


def test_gradients_of_what_is_not_stepped_are_not_looked_at() -> None:
    """The other player's parameters, say."""
    model = nn.ParameterDict({"mine": torch.ones(2), "theirs": torch.zeros(2)})
    with pytest.warns(UserWarning, match="not in the optimizer"):
        updater = ms.Updater(model, torch.optim.SGD([model["mine"]], lr=0.1))
    record = updater.update(
        [torch.ones(1)],
        lambda m, _: m["mine"].sum() + m["theirs"].sqrt().sum(),
        count=ms.rows(),
    )
    assert record.applied
    assert model["theirs"].grad is not None
    assert not model["theirs"].grad.isfinite().any()
    updater.update([torch.ones(1)], lambda m, _: m["mine"].sum(), count=ms.rows())
    assert model["theirs"].grad is None  # and they are cleared with the rest


# -- Skip ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("value", [INF, NAN])
def test_skipping_leaves_every_bit_and_a_record(fused: bool, value: float) -> None:
    model = classifier(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    updater = ms.Updater(
        model,
        optimizer,
        clip=ms.ByGlobalNorm(0.1),
        nonfinite=ms.Skip(),
        schedule=StepLR(optimizer, 1, 0.9),
    )
    updater.update(GOOD, loss_sum, count=ms.targets())
    before = trace_of(updater)
    record = updater.update([*GOOD, bad(value)], loss_sum, count=ms.targets())
    assert trace_of(updater) == before
    assert gradients(model) == []
    assert (record.verdict, record.update, record.step) == ("skipped_nonfinite", 2, 1)
    assert record.num_nonfinite > 0
    assert record.grad_norm is not None
    assert not math.isfinite(record.grad_norm)
    assert record.lr == [pytest.approx(0.009)]
    assert not record.clipped
    assert "skipped (nonfinite)" in str(record)


def test_a_run_with_a_skipped_window_is_the_run_without_it() -> None:
    def run(batches: list[list[Pair]]) -> nn.Module:
        updater = trained(nonfinite=ms.Skip())
        for group in batches:
            updater.update(group, loss_sum, count=ms.targets())
        return updater.model

    with_bad = run([GOOD, [bad()], GOOD, [bad(NAN), *GOOD], GOOD])
    without = run([GOOD, GOOD, GOOD])
    assert bits(with_bad.state_dict()) == bits(without.state_dict())


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_so_many_windows_in_a_row_are_skipped_and_the_next_raises(limit: int) -> None:
    updater = trained(nonfinite=ms.Skip(max_consecutive=limit))

    def step(batch: Pair) -> str:
        return updater.update([batch], loss_sum, count=ms.targets()).verdict

    for _ in range(2):  # an applied update in between counts from the start again
        assert [step(bad()) for _ in range(limit)] == ["skipped_nonfinite"] * limit
        assert step(GOOD[0]) == "applied"
    for _ in range(limit):
        step(bad())
    before, update = trace_of(updater), updater.clock.update
    with pytest.raises(ms.NonFiniteGradient) as caught:
        step(bad())
    assert trace_of(updater) == before
    assert updater.clock.update == update
    assert caught.value.microbatch == 0


def test_any_number_is_skipped_without_a_limit() -> None:
    updater = trained(nonfinite=ms.Skip())
    verdicts = {updater.update([bad()], loss_sum, count=ms.targets()).verdict for _ in range(50)}
    assert verdicts == {"skipped_nonfinite"}


def test_a_skipped_window_is_not_run_again() -> None:
    updater = trained(nonfinite=ms.Skip())
    num_calls = 0

    def loss(m: nn.Module, b: Pair) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return F.cross_entropy(m(b[0]), b[1], reduction="sum")

    updater.update([GOOD[0], bad()], loss, count=ms.targets())
    assert num_calls == 2


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "2"])
def test_a_limit_that_is_no_whole_number_is_refused(limit: Any) -> None:
    with pytest.raises(ValueError, match="max_consecutive="):
        ms.Skip(max_consecutive=limit)
