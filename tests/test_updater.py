"""The order of a step, held against plain torch; and the published figures of accumulation."""

import copy
import math
import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_loop import (
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
    pairs,
    plain_update,
    weights,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

import midstep as ms

INF = math.inf


def sgd(model: nn.Module, lr: float = 0.1, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **settings)


# -- published figures ---------------------------------------------------------------------------


def regressor() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def regression_rows() -> Pair:
    torch.manual_seed(1)
    x = torch.randn(64, 8)
    return x, x.sum(dim=1, keepdim=True)


def squared_error(model: nn.Module, batch: Pair) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum")


def regression_gradient() -> list[Tensor]:
    model = regressor()
    x, y = regression_rows()
    F.mse_loss(model(x), y).backward()
    return gradients(model)


def cut(batch: Pair, *sizes: int) -> list[Pair]:
    return list(zip(batch[0].split(list(sizes)), batch[1].split(list(sizes)), strict=True))


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("sizes", [(16, 16, 16, 16), (24, 24, 16), (1, 63)])
def test_figures_1_and_3_a_window_is_the_full_batch_to_rounding(
    sizes: tuple[int, ...], counted: bool
) -> None:
    """Published, for plain torch: 2.384e-07 between 4 x 16 rows and 64, and for shares of rows."""
    model = regressor()
    ms.Updater(model, sgd(model, 0.0)).update(
        cut(regression_rows(), *sizes),
        lambda m, b: ms.LossSum(squared_error(m, b), b[1].numel()),
        count=ms.elements() if counted else None,
    )
    assert distance(gradients(model), regression_gradient()) < 1e-6


def test_figure_2_without_a_denominator_the_gradient_is_four_times_too_long() -> None:
    model = regressor()
    for x, y in cut(regression_rows(), 16, 16, 16, 16):
        F.mse_loss(model(x), y).backward()
    full = regression_gradient()
    assert distance(gradients(model), full) == pytest.approx(4.8079, abs=5e-4)
    assert norm_of(gradients(model)) / norm_of(full) == pytest.approx(4.0, abs=1e-5)


def test_figure_3_the_mean_of_uneven_means_is_off() -> None:
    model = regressor()
    for x, y in cut(regression_rows(), 24, 24, 16):
        (F.mse_loss(model(x), y) / 3).backward()
    assert distance(gradients(model), regression_gradient()) == pytest.approx(0.20217, abs=5e-5)


@pytest.mark.parametrize("counted", [True, False])
def test_figure_10_masked_targets_and_the_clipped_adamw_update_are_the_full_batch(
    counted: bool,
) -> None:
    torch.manual_seed(24)
    x = torch.randn(7, 4, dtype=torch.float64)
    y = torch.tensor([0, 1, -100, 2, 0, -100, 1])
    base = nn.Linear(4, 3).double()
    ours, full, wrong = copy.deepcopy(base), copy.deepcopy(base), copy.deepcopy(base)
    pieces = [(x[s], y[s]) for s in (slice(0, 2), slice(2, 5), slice(5, 7))]
    settings = {"lr": 0.01, "weight_decay": 0.1}
    # First the gradient itself, then the update clipped to 0.5.
    ms.Updater(ours, sgd(ours, 0.0)).update(
        pieces,
        lambda m, b: ms.cross_entropy(m(b[0]), b[1]),
        count=ms.targets() if counted else None,
    )
    assert distance(gradients(ours), full_batch_gradient(full, pieces)) < 1e-12
    for piece in pieces:
        (F.cross_entropy(wrong(piece[0]), piece[1]) / 3).backward()
    assert distance(gradients(wrong), full_batch_gradient(full, pieces)) > 1e-6
    updater = ms.Updater(
        ours, torch.optim.AdamW(ours.parameters(), **settings), clip=ms.ByGlobalNorm(0.5)
    )
    record = updater.update(
        pieces,
        lambda m, b: ms.cross_entropy(m(b[0]), b[1]),
        count=ms.targets() if counted else None,
    )
    optimizer = torch.optim.AdamW(full.parameters(), **settings)
    norm = plain_update(full, optimizer, F.cross_entropy(full(x), y), 0.5)
    assert record.denominators == {"loss": 5}
    assert record.grad_norm == pytest.approx(norm, rel=1e-12)
    assert distance(weights(ours), weights(full)) < 1e-12


def figure_11() -> tuple[nn.Linear, list[Pair]]:
    torch.manual_seed(9)
    base = nn.Linear(4, 3).double()
    sizes = [3, 2, 4, 1, 2]
    return base, [(torch.randn(n, 4, dtype=torch.float64), torch.arange(n) % 3) for n in sizes]


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("door", ["update", "loop"])
def test_figure_11_short_last_window_rates_and_weights(counted: bool, door: str) -> None:
    base, batches = figure_11()
    ours, full = copy.deepcopy(base), copy.deepcopy(base)
    optimizer = sgd(ours)
    updater = ms.Updater(
        ours, optimizer, clip=ms.ByGlobalNorm(1.0), schedule=StepLR(optimizer, 1, 0.9)
    )
    records = []
    for window in updater.windows(batches, size=3, count=ms.targets() if counted else None):
        if door == "update":
            records.append(updater.update(window, lambda m, b: ms.cross_entropy(m(b[0]), b[1])))
            continue
        for batch in window:
            with window.forward():
                value = ms.cross_entropy(ours(batch[0]), batch[1])
            window.backward(value)
        records.append(window.step())
    theirs = sgd(full)
    schedule = StepLR(theirs, 1, 0.9)
    means = []
    for group in (batches[:3], batches[3:]):
        x, y = joined(group)
        loss_mean = F.cross_entropy(full(x), y)
        means.append(loss_mean.item())
        plain_update(full, theirs, loss_mean, 1.0)
        schedule.step()
    assert [r.num_microbatches for r in records] == [3, 2]
    assert [r.denominators["loss"] for r in records] == [9, 3]
    assert [r.lr for r in records] == [[0.1], [pytest.approx(0.09)]]
    assert [r.loss_mean for r in records] == pytest.approx(means, abs=1e-12)  # never divided by k
    assert updater.clock.step == 2
    assert distance(weights(ours), weights(full)) < 1e-12
    ignored = [(torch.ones(2, 4, dtype=torch.float64), torch.full((2,), -100))]
    with pytest.raises(ms.EmptyWindow):
        updater.update(ignored, loss_sum, count=ms.targets())
    assert distance(weights(ours), weights(full)) < 1e-12


def test_figure_17_the_update_is_the_mean_of_equal_microbatch_gradients() -> None:
    """Four microbatches whose gradients are a, b, c, d: the mean, where adding gives four times."""
    rows = torch.tensor([[1.0, 2.0], [-3.0, 4.0], [5.0, -6.0], [7.0, 8.0]])
    model = nn.Linear(2, 1, bias=False)
    before = weights(model)[0]
    ms.Updater(model, sgd(model, 1.0)).update(
        [row[None] for row in rows], lambda m, b: m(b).sum(), count=ms.rows()
    )
    assert torch.allclose(before - weights(model)[0], rows.mean(dim=0)[None])


# -- the whole order against the plain loop ------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "Adagrad", "NAdam", "Adafactor"])
def test_many_updates_follow_the_plain_loop(name: str) -> None:
    """Clip, schedule, weight average and tails, over epochs, with any optimizer of torch."""
    kind = getattr(torch.optim, name)
    ours, full = classifier(), classifier()
    optimizer, theirs = kind(ours.parameters(), lr=0.02), kind(full.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        theirs, 0.1, total_steps=20, cycle_momentum=False
    )
    average, their_average = AveragedModel(ours), AveragedModel(full)
    updater = ms.Updater(
        ours,
        optimizer,
        clip=ms.ByGlobalNorm(0.3),
        schedule=torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=20, cycle_momentum=False
        ),
        averaged_model=average,
    )
    batches = pairs(3, 2, 4, 1, 2)
    for _ in range(3):
        for window in updater.windows(batches, size=2, count=ms.targets()):
            updater.update(window, loss_sum)
        for group in (batches[:2], batches[2:4], batches[4:]):
            x, y = joined(group)
            plain_update(full, theirs, F.cross_entropy(full(x), y), 0.3)
            schedule.step()
            their_average.update_parameters(full)
    assert distance(weights(ours), weights(full)) < 1e-10
    assert distance(weights(average), weights(their_average)) < 1e-10
    assert updater.clock.epoch == 3
    assert updater.clock.denominators == {"loss": 3 * sum(map(num_targets, batches))}


def test_after_an_applied_update_the_gradients_are_the_clipped_ones_until_the_next() -> None:
    model = classifier()
    updater = ms.Updater(model, sgd(model), clip=ms.ByGlobalNorm(0.01))
    before = weights(model)
    record = updater.update(pairs(4, 4), loss_sum, count=ms.targets())
    assert record.clipped
    assert norm_of(gradients(model)) == pytest.approx(0.01, rel=1e-12)
    moved = [b - 0.1 * g for b, g in zip(before, gradients(model), strict=True)]
    assert distance(weights(model), moved) < 1e-15


def test_weights_are_held_fixed_inside_a_window() -> None:
    model = classifier()
    updater = ms.Updater(model, sgd(model))
    before = weights(model)
    for window in updater.windows(pairs(2, 2, 2), size=3):
        for batch in window:
            window.backward(loss_sum(model, batch), count=2)
            assert distance(weights(model), before) == 0.0
        window.step()
    assert distance(weights(model), before) > 0.0


def test_gradients_from_before_a_window_do_not_leak_into_it() -> None:
    model = classifier()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    batches = pairs(3, 3)
    ms.Updater(model, sgd(model, 0.0)).update(batches, loss_sum, count=ms.targets())
    assert distance(gradients(model), full_batch_gradient(model, batches)) < 1e-12


class _Spike(ms.ByGlobalNorm):
    """A clip rule that refuses every window."""

    def decide(self, gradients: Any, attempt: Any) -> Any:
        from midstep.clip.rule import Decision

        return Decision(clipped=False, skip=True)


def test_a_skipped_spike_leaves_no_trace_but_its_record() -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = StepLR(optimizer, 1, 0.5)
    average = AveragedModel(model)
    updater = ms.Updater(
        model, optimizer, clip=_Spike(1.0), schedule=schedule, averaged_model=average
    )
    before = weights(model)
    record = updater.update(pairs(3), loss_sum, count=ms.targets())
    assert (record.verdict, record.update, record.step) == ("skipped_spike", 1, 0)
    assert distance(weights(model), before) == 0.0
    assert not optimizer.state
    assert schedule.last_epoch == 0
    assert average.n_averaged == 0
    assert gradients(model) == []


def test_the_average_of_the_weights_follows_applied_updates_only() -> None:
    model = classifier(torch.float32)
    average = AveragedModel(model)
    updater = ms.Updater(model, sgd(model), averaged_model=average, nonfinite=ms.Skip())
    good, bad = pairs(3, dtype=torch.float32)[0], (torch.full((2, 4), INF), torch.tensor([0, 1]))
    verdicts = [
        updater.update([batch], loss_sum, count=ms.targets()).verdict for batch in (good, bad, good)
    ]
    assert verdicts == ["applied", "skipped_nonfinite", "applied"]
    assert average.n_averaged == 2


# -- parameters of every kind --------------------------------------------------------------------


def test_tied_weights_are_counted_and_stepped_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(5, 4, dtype=torch.float64)
            self.head = nn.Linear(4, 5, bias=False, dtype=torch.float64)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids))  # type: ignore[no-any-return]

    ours, full = Tied(), Tied()
    ids = torch.tensor([0, 1, 2, 3, 4, 0])
    updater = ms.Updater(ours, sgd(ours), clip=ms.ByGlobalNorm(0.1))
    record = updater.update(
        [ids[:2], ids[2:]],
        lambda m, b: F.cross_entropy(m(b), b, reduction="sum"),
        count=ms.rows(),
    )
    norm = plain_update(full, sgd(full), F.cross_entropy(full(ids), ids), 0.1)
    assert record.grad_norm == pytest.approx(norm, rel=1e-12)
    assert distance(weights(ours), weights(full)) < 1e-12


@pytest.mark.parametrize("counted", [True, False])
def test_a_sparse_embedding_gradient_is_accumulated_clipped_and_stepped(counted: bool) -> None:
    def bag() -> nn.EmbeddingBag:
        torch.manual_seed(0)
        return nn.EmbeddingBag(6, 3, sparse=True, mode="sum", dtype=torch.float64)

    ours, full = bag(), bag()
    batches = [torch.tensor([[0, 1], [1, 1]]), torch.tensor([[1, 5]])]
    updater = ms.Updater(
        ours, torch.optim.SparseAdam(list(ours.parameters())), clip=ms.ByGlobalNorm(0.5)
    )
    theirs = torch.optim.SparseAdam(list(full.parameters()))
    loss = lambda m, b: ms.LossSum(m(b).square().sum(), 2 * len(b))  # noqa: E731
    for _ in range(2):
        record = updater.update(batches, loss, count=(lambda b: 2 * len(b)) if counted else None)
        theirs.zero_grad()
        (full(torch.cat(batches)).square().sum() / 6).backward()
        grad = full.weight.grad
        assert grad is not None
        grad = grad.coalesce()
        norm = grad.values().norm().item()
        full.weight.grad = grad * min(1.0, 0.5 / norm)
        theirs.step()
        assert record.grad_norm == pytest.approx(norm, rel=1e-12)
        assert distance(weights(ours), weights(full)) < 1e-12
    assert ours.weight.grad is not None
    assert ours.weight.grad.is_sparse


def test_complex_parameters_are_measured_and_clipped_by_their_modulus() -> None:
    def model() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(3, 2, dtype=torch.complex128)

    ours, full = model(), model()
    x = torch.randn(5, 3, dtype=torch.complex128)
    updater = ms.Updater(ours, sgd(ours), clip=ms.ByGlobalNorm(0.2))
    record = updater.update([x[:2], x[2:]], lambda m, b: m(b).abs().square().sum(), count=ms.rows())
    (full(x).abs().square().sum() / 5).backward()
    norm = math.sqrt(sum(float(g.abs().square().sum()) for g in gradients(full)))
    for p in full.parameters():
        assert p.grad is not None
        p.grad.mul_(0.2 / norm)
    sgd(full).step()
    assert record.grad_norm == pytest.approx(norm, rel=1e-12)
    assert distance(weights(ours), weights(full)) < 1e-12


def test_parameters_of_several_dtypes_are_clipped_by_one_norm() -> None:
    def model() -> nn.ParameterDict:
        return nn.ParameterDict(
            {
                "wide": nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64)),
                "usual": nn.Parameter(torch.full((2,), 3.0)),
                "narrow": nn.Parameter(torch.full((4,), 0.5, dtype=torch.bfloat16)),
            }
        )

    def loss(m: nn.ParameterDict, b: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for p in m.values():
            total = total + (p.double() * b.sum()).sum()
        return total

    ours = model()
    updater = ms.Updater(ours, sgd(ours, 1.0), clip=ms.ByGlobalNorm(1.5))
    record = updater.update(
        [torch.ones(2, dtype=torch.float64), torch.full((1,), 4.0, dtype=torch.float64)],
        loss,
        count=ms.rows(),
    )
    assert record.grad_norm == pytest.approx(2.0 * 3.0)  # nine entries of (2 + 4) / 3
    for name, start in {"wide": 2.0, "usual": 3.0, "narrow": 0.5}.items():
        assert ours[name].tolist() == pytest.approx([start - 0.5] * ours[name].numel())


def test_frozen_parameters_stay_and_those_unfrozen_join_in() -> None:
    ours = classifier()
    head = ours[2]
    for p in ours[0].parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    updater = ms.Updater(ours, optimizer, clip=ms.ByGlobalNorm(0.05))
    batches = pairs(3, 3)
    before = weights(ours[0])
    record = updater.update(batches, loss_sum, count=ms.targets())
    assert distance(weights(ours[0]), before) == 0.0
    assert record.grad_norm == pytest.approx(norm_of(full_batch_gradient_of(ours, head, batches)))
    for p in ours[0].parameters():
        p.requires_grad_(True)
    optimizer.add_param_group({"params": list(ours[0].parameters()), "lr": 0.2})
    twin = clone(ours)
    record = updater.update(batches, loss_sum, count=ms.targets())
    assert record.lr == [0.1, 0.2]
    grads = full_batch_gradient(twin, batches)
    norm = norm_of(grads)
    assert record.grad_norm == pytest.approx(norm, rel=1e-12)
    lrs = (0.2, 0.2, 0.1, 0.1)
    expected = [
        w - lr * g * min(1.0, 0.05 / norm)
        for w, lr, g in zip(weights(twin), lrs, grads, strict=True)
    ]
    assert distance(weights(ours), expected) < 1e-12


def full_batch_gradient_of(model: nn.Module, part: nn.Module, batches: list[Pair]) -> list[Tensor]:
    """The gradient of one part; taken before the step, so at weights that SGD moved back."""
    assert all(p.grad is not None for p in part.parameters())
    twin = clone(model)
    x, y = joined(batches)
    head = twin[2]  # type: ignore[index]
    for p, now in zip(head.parameters(), part.parameters(), strict=True):
        with torch.no_grad():
            assert now.grad is not None
            p.add_(now.grad, alpha=0.1)
    twin.zero_grad()
    F.cross_entropy(twin(x), y).backward()
    return gradients(head)


def test_a_parameter_that_gets_no_gradient_is_not_stepped_nor_decayed() -> None:
    model = nn.ParameterDict({"used": torch.ones(2), "unused": torch.ones(2)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    updater = ms.Updater(model, optimizer)
    updater.update([torch.ones(3)], lambda m, b: (m["used"].sum() * b).sum(), count=ms.rows())
    assert model["unused"].tolist() == [1.0, 1.0]
    assert len(optimizer.state) == 1


def test_two_updaters_train_the_two_players_of_a_gan_as_two_plain_loops_do() -> None:
    def players() -> tuple[nn.Linear, nn.Linear]:
        torch.manual_seed(0)
        return nn.Linear(2, 3, dtype=torch.float64), nn.Linear(3, 1, dtype=torch.float64)

    maker, judge = players()
    their_maker, their_judge = players()
    maker_updater = ms.Updater(maker, sgd(maker), clip=ms.ByGlobalNorm(0.5))
    judge_updater = ms.Updater(judge, sgd(judge), clip=ms.ByGlobalNorm(0.5))
    their_maker_step, their_judge_step = sgd(their_maker), sgd(their_judge)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        real = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        noise = torch.randn(5, 2, generator=generator, dtype=torch.float64)

        def judging(m: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
            return (F.softplus(-m(b[0])) + F.softplus(m(maker(b[1]).detach()))).sum()

        def making(m: nn.Module, b: Tensor) -> Tensor:
            return F.softplus(-judge(m(b))).sum()

        pieces = [(real[:2], noise[:2]), (real[2:], noise[2:])]
        judge_updater.update(pieces, judging, count=ms.rows())
        maker_updater.update([noise[:4], noise[4:]], making, count=ms.rows())
        fake = their_maker(noise).detach()
        judged = F.softplus(-their_judge(real)) + F.softplus(their_judge(fake))
        plain_update(their_judge, their_judge_step, judged.mean(), 0.5)
        made = F.softplus(-their_judge(their_maker(noise))).mean()
        plain_update(their_maker, their_maker_step, made, 0.5)
    assert distance(weights(judge), weights(their_judge)) < 1e-12
    assert distance(weights(maker), weights(their_maker)) < 1e-12


NEEDS_COMPILER = pytest.mark.skipif(shutil.which("gcc") is None, reason="inductor needs gcc")


@pytest.mark.filterwarnings("ignore")  # of the compiler, about torch itself
@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=[NEEDS_COMPILER, pytest.mark.slow])],
)
def test_a_compiled_model_gives_the_same_updates(backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    full = copy.deepcopy(model)
    compiled: nn.Module = torch.compile(model, backend=backend)  # type: ignore[assignment]
    updater = ms.Updater(compiled, sgd(model), clip=ms.ByGlobalNorm(0.1))
    theirs = sgd(full)
    batches = pairs(3, 3, dtype=torch.float32)
    for _ in range(2):
        record = updater.update(batches, loss_sum, count=ms.targets())
        x, y = joined(batches)
        norm = plain_update(full, theirs, F.cross_entropy(full(x), y), 0.1)
        assert record.grad_norm == pytest.approx(norm, rel=1e-5)
    assert distance(weights(model), weights(full)) < 1e-6
    bad = (torch.full((3, 4), INF), torch.tensor([0, 1, 2]))
    with pytest.raises(ms.NonFiniteGradient) as caught:
        updater.update([batches[0], bad], loss_sum, count=ms.targets())
    assert set(caught.value.parameters) == {"weight", "bias"}  # not `_orig_mod.weight`
    assert caught.value.microbatch == 1


# -- at construction -----------------------------------------------------------------------------


def test_an_optimizer_that_wants_a_closure_is_refused() -> None:
    model = classifier()
    with pytest.raises(TypeError, match=r"LBFGS\.step\(closure\)"):
        ms.Updater(model, torch.optim.LBFGS(model.parameters()))


def test_an_optimizer_whose_step_was_wrapped_by_a_scheduler_is_still_seen_through() -> None:
    model = classifier()
    optimizer = torch.optim.LBFGS(model.parameters())
    StepLR(optimizer, 1)
    with pytest.raises(TypeError, match="evaluates the loss as often as it likes"):
        ms.Updater(model, optimizer)
    plain = sgd(model)
    StepLR(plain, 1)
    ms.Updater(model, plain)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clip", 1.0),
        ("clip", ms.ByGlobalNorm),
        ("precision", "bf16"),
        ("precision", torch.bfloat16),
        ("nonfinite", "skip"),
        ("nonfinite", ms.Raise),
        ("empty", True),
        ("schedule", 0.1),
    ],
)
def test_what_is_no_stage_is_refused_at_construction(name: str, value: Any) -> None:
    model = classifier()
    with pytest.raises(TypeError, match=f"`{name}"):
        ms.Updater(model, sgd(model), **{name: value})


@pytest.mark.parametrize("optimizer", [None, "sgd", 3])
def test_what_is_no_optimizer_is_refused(optimizer: Any) -> None:
    with pytest.raises(TypeError, match="`optimizer` is a"):
        ms.Updater(classifier(), optimizer)


def test_parameters_that_the_optimizer_lacks_are_reported() -> None:
    model = classifier()
    with pytest.warns(UserWarning, match=r"2 trainable parameters .* `0.weight`, `0.bias`") as seen:
        ms.Updater(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    assert seen[0].filename == __file__


def test_parameters_that_the_model_lacks_are_reported() -> None:
    model = classifier()
    optimizer = sgd(classifier())
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"4 parameters of the optimizer are not in the model"):
        ms.Updater(model, optimizer)


def test_all_that_fits_is_silent() -> None:
    model = classifier()
    for p in model[0].parameters():
        p.requires_grad_(False)
    ms.Updater(model, torch.optim.SGD(model[2].parameters(), lr=0.1))  # warnings are errors


# -- the clocks and the state --------------------------------------------------------------------


def test_the_state_of_a_run_cannot_be_taken_inside_a_window() -> None:
    model = classifier()
    updater = ms.Updater(model, sgd(model))
    window = next(windows := updater.windows(pairs(2, 2), size=2))
    with pytest.raises(ms.WindowError, match="inside a window"):
        updater.state_dict()
    for batch in window:
        window.backward(loss_sum(model, batch), count=2)
    window.step()
    assert updater.state_dict()["clock"]["step"] == 1
    windows.close()  # type: ignore[attr-defined]


def test_seconds_run_from_asking_for_the_first_batch_to_the_verdict() -> None:
    def slow() -> Any:
        for batch in pairs(2, 2):
            time.sleep(0.02)
            yield batch

    model = classifier()
    updater = ms.Updater(model, sgd(model))
    (record,) = [
        updater.update(w, loss_sum) for w in updater.windows(slow(), size=2, count=ms.targets())
    ]
    assert 0.04 <= record.seconds < 5.0


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2"])
@pytest.mark.parametrize("name", ["size", "rows", "targets"])
def test_a_window_of_no_whole_number_is_refused_before_anything_is_read(
    name: str, size: Any
) -> None:
    model = classifier()
    updater = ms.Updater(model, sgd(model))

    def unread() -> Any:
        raise AssertionError
        yield

    with pytest.raises(ValueError, match=f"windows\\({name}={size!r}\\)"):
        updater.windows(unread(), count=ms.targets(), **{name: size})


@pytest.mark.parametrize("ways", [{}, {"size": 1, "rows": 1}, {"size": 1, "rows": 1, "targets": 1}])
def test_exactly_one_way_to_cut_must_be_given(ways: dict[str, int]) -> None:
    model = classifier()
    with pytest.raises(ValueError, match="exactly one"):
        ms.Updater(model, sgd(model)).windows([], **ways)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"targets": 4}, ValueError, "without `count=`"),
        ({"rows": 4, "drop_tail": True}, ValueError, "no tail to drop"),
        ({"size": 4, "count": 8}, TypeError, "must be a function"),
        ({"size": 4, "empty": "skip"}, TypeError, "`empty='skip'`"),
    ],
)
def test_what_could_not_be_honoured_is_refused(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = classifier()
    with pytest.raises(error, match=message):
        ms.Updater(model, sgd(model)).windows([], **settings)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (2, 2, 2), (2,), ()])
def test_a_short_last_window_may_be_dropped(sizes: tuple[int, ...], counted: bool) -> None:
    model = classifier()
    updater = ms.Updater(model, sgd(model))
    count = ms.targets() if counted else None
    loss: Callable[..., Any] = lambda m, b: ms.cross_entropy(m(b[0]), b[1])  # noqa: E731
    found = [
        updater.update(w, loss).num_microbatches
        for w in updater.windows(pairs(*sizes), size=2, count=count, drop_tail=True)
    ]
    assert found == [2] * (len(sizes) // 2)


def test_a_last_window_with_too_few_targets_may_be_dropped() -> None:
    batches = [(torch.ones(n, 4, dtype=torch.float64), torch.zeros(n).long()) for n in (3, 3, 2)]
    model = classifier()
    updater = ms.Updater(model, sgd(model))
    found = [
        updater.update(w, loss_sum).denominators["loss"]
        for w in updater.windows(batches, targets=5, count=ms.targets(), drop_tail=True)
    ]
    assert found == [6]


def test_a_streamed_run_goes_on_with_the_divisor_it_had() -> None:
    def run(updater: ms.Updater, num_windows: int) -> None:
        windows = updater.windows([torch.ones(3, 1)] * (2 * num_windows), size=2)
        for window in windows:
            for batch in window:
                window.backward(updater.model(batch).sum(), count=10_000)
            window.step()

    model = nn.Linear(1, 1)
    before, after = (ms.Updater(model, sgd(model)) for _ in range(2))
    run(before, 1)
    after.load_state_dict(before.state_dict())
    assert after.state_dict()["divisor"] == before.state_dict()["divisor"] == 2.0**14
