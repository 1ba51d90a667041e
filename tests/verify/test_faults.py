"""Faults planted one at a time: each is not certified, and its own cause is the reason given."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import setups as s
import sound_setups as sound
import torch
from setups import Setup
from torch import Tensor, nn
from torch.nn import functional as F

import midstep as ms

Fault = Callable[[], Setup]
FAULTS: dict[str, tuple[Fault, str, str]] = {}


def fault(kind: str, words: str) -> Callable[[Fault], Fault]:
    """A set-up whose first reason must be of this kind and say these words."""

    def keep(make: Fault) -> Fault:
        FAULTS[make.__name__] = (make, kind, words)
        return make

    return keep


# -- layers -----------------------------------------------------------------------------------


@fault("layers", "`1` (BatchNorm1d")
def batch_norm() -> Setup:
    return Setup(s.mlp(nn.BatchNorm1d(8)), s.pairs(), s.summed, ms.targets())


@fault("layers", "`features.4` (BatchNorm2d")
def batch_norm_twice_in_a_convolutional_net() -> Setup:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.features = nn.Sequential(
                *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
                *(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
            )
            self.out = nn.Linear(4 * 16, s.CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.features(x).flatten(1))

    return Setup(Net(), s.image_pairs(), s.summed, ms.targets())


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


@fault("layers", "`1` (Centred")
def a_layer_of_ones_own_that_centres_the_batch() -> Setup:
    return Setup(s.mlp(Centred()), s.pairs(), s.summed, ms.targets())


class Inline(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(s.WIDTH, 8), nn.Linear(8, s.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.batch_norm(self.a(x), None, None, training=True))


@fault("layers", "`the model itself` (Inline")
def batch_norm_as_a_function() -> Setup:
    return Setup(Inline(), s.pairs(), s.summed, ms.targets())


@fault("layers", "`attend` (MultiheadAttention")
def attention_over_the_wrong_dimension() -> Setup:
    setup = sound.attention_of_torch()
    setup.model.attend.batch_first = False  # rows attend to rows
    return setup


@fault("layers", "`rnn` (LSTM")
def recurrence_over_the_wrong_dimension() -> Setup:
    setup = sound.lstm()
    setup.model.rnn.batch_first = False
    return setup


@fault("layers", "`1` (Softmax")
def softmax_over_the_rows() -> Setup:
    return Setup(s.mlp(nn.Softmax(dim=0)), s.pairs(), s.summed, ms.targets())


@fault("layers", "(Capacity")
def experts_with_a_capacity() -> Setup:
    class Capacity(sound.Experts):
        def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
            likes, chosen = super().routed(x)
            place = (F.one_hot(chosen, 3).cumsum(0) - 1).gather(1, chosen[:, None]).squeeze(1)
            return likes, chosen.masked_fill(place >= 2, -1)  # the rest is dropped

    return Setup(Capacity(), s.pairs(), s.summed, ms.targets())


# -- the loss ---------------------------------------------------------------------------------


def similarities(model: nn.Module, x: Tensor) -> Tensor:
    z = F.normalize(model(x), dim=1)
    return z @ z.roll(1, 1).T


@fault("loss", "`return F.cross_entropy(logits, torch.arange(len(x)), reduction=")
def contrastive() -> Setup:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        logits = similarities(model, x)
        return F.cross_entropy(logits, torch.arange(len(x)), reduction="sum")

    return Setup(s.mlp(), s.vectors(), loss, ms.rows())


@fault("loss", "(term `balance`)")
def load_balancing_of_experts() -> Setup:
    def loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        likes, chosen = model.routed(batch[0])
        share = F.one_hot(chosen, 3).to(likes).mean(0)
        balance = 3 * (share * likes.mean(0)).sum()
        return {"class": s.summed(model, batch), "balance": balance * len(batch[0])}

    count = lambda b: {"class": int((b[1] != -100).sum()), "balance": len(b[1])}  # noqa: E731
    return Setup(sound.Experts(), s.pairs(), loss, count)


@fault("divisor", "where a sum has 1")
def one_number_that_is_not_linear_in_its_rows() -> Setup:
    loss = lambda m, b: len(b) * m(b).square().mean().sqrt()  # noqa: E731
    return Setup(s.mlp(), s.vectors(), loss, ms.rows())


@fault("loss", "mean(0)")
def a_baseline_over_the_batch() -> Setup:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        score = model(x).square().sum(1)
        return (score * (score.detach() - score.detach().mean(0))).sum()

    return Setup(s.mlp(), s.vectors(), loss, ms.rows())


@fault("loss", "hardest = ")
def triplets_with_the_hardest_negative() -> Setup:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        z = model(x)
        distances = torch.cdist(z, z + 0.1)
        hardest = (distances + 1e3 * torch.eye(len(z)).to(z)).amin(1)
        return (distances.diagonal() - hardest + 5).relu().sum()

    return Setup(s.mlp(), s.vectors(), loss, ms.rows())


@fault("layers", "`1` (BatchNorm1d")
def batch_norm_and_a_contrastive_loss() -> Setup:
    setup = contrastive()
    setup.model = s.mlp(nn.BatchNorm1d(8))
    return setup


# -- draws ------------------------------------------------------------------------------------


@fault("draws", "the gap falls from")
def dropout() -> Setup:
    return Setup(s.mlp(nn.Dropout(0.3)), s.pairs(), s.summed, ms.targets())


@fault("draws", "which is equal")
def dropout_in_attention() -> Setup:
    return sound.masked_encoder(dropout=0.2)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


@fault("draws", "which is equal")
def noise() -> Setup:
    return Setup(s.mlp(Noisy()), s.pairs(), s.summed, ms.targets())


class OwnNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stream = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=self.stream, dtype=x.dtype)


@fault("draws", "a generator of the model")
def noise_of_a_generator_of_its_own() -> Setup:
    return Setup(s.mlp(OwnNoise()), s.pairs(), s.summed, ms.targets())


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if random.random() < 0.5 else x


@fault("draws", "python")
def a_layer_dropped_by_pythons_dice() -> Setup:
    random.seed(4)
    return Setup(s.mlp(LayerDrop()), s.pairs(), s.summed, ms.targets())


# -- state ------------------------------------------------------------------------------------


@fault("state", "parametrizations.weight.0._u")
def spectral_norm() -> Setup:
    model = s.mlp()
    model[0] = nn.utils.parametrizations.spectral_norm(model[0])
    return Setup(model, s.pairs(), s.summed, ms.targets())


class Warming(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


@fault("state", "`1.calls`")
def a_counter_in_a_layer() -> Setup:
    return Setup(s.mlp(Warming()), s.pairs(), s.summed, ms.targets())


class Moving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        out = x * (1 + self.centre)
        self.centre = self.centre + 0.1
        return out


@fault("state", "`1.centre`")
def a_buffer_that_moves_with_each_forward() -> Setup:
    return Setup(s.mlp(Moving()), s.pairs(), s.summed, ms.targets())


@fault("state", "run again")
def noise_that_nobody_can_put_back() -> Setup:
    dice = random.SystemRandom()
    loss = lambda m, b: s.summed(m, b) * (1 + dice.random())  # noqa: E731
    return Setup(s.mlp(), s.pairs(), loss, ms.targets())


@fault("state", "run again")
def a_counter_outside_of_the_model() -> Setup:
    calls: Iterator[int] = iter(range(1, 10_000))
    loss = lambda m, b: s.summed(m, b) * next(calls)  # noqa: E731
    return Setup(s.mlp(), s.pairs(), loss, ms.targets())


# -- divisors, means and counts ---------------------------------------------------------------


def full_pairs() -> tuple[Tensor, Tensor]:
    return s.vectors(), s.full_labels()


@fault("divisor", "4.000 = number of microbatches")
def a_mean_where_a_sum_is_due() -> Setup:
    return Setup(s.mlp(), full_pairs(), s.mean, ms.targets())


@fault("divisor", "near 4, the number of microbatches")
def a_mean_over_masked_targets_where_a_sum_is_due() -> Setup:
    x, y = full_pairs()
    y[1:8:3] = -100
    y[9:] = -100
    y[10] = 2
    return Setup(s.mlp(), (x, y), s.mean, ms.targets())


@fault("divisor", "4.000 = number of microbatches")
def a_mean_divided_once_more_by_the_number_of_microbatches() -> Setup:
    loss = lambda m, b: s.mean(m, b) / 4  # noqa: E731
    return Setup(s.mlp(), full_pairs(), loss, ms.rows())


@fault("mean of means", "entries of `[1]` that are not -100")
def a_mean_of_means() -> Setup:
    return Setup(s.mlp(), s.pairs(), s.mean, lambda _: 1)


@fault("mean of means", "a mean over rows")
def a_mean_of_means_over_rows() -> Setup:
    loss = lambda m, x: m(x).square().mean()  # noqa: E731
    return Setup(s.mlp(), s.vectors(), loss, lambda _: 1)


@fault("count", "entries of `[1]` that are not -100")
def a_mean_taken_back_with_rows_instead_of_targets() -> Setup:
    loss = lambda m, b: ms.LossSum.from_mean(s.mean(m, b), len(b[1]))  # noqa: E731
    return Setup(s.mlp(), s.pairs(), loss)


@fault("count", "says it is a sum over")
def a_count_that_forgets_the_mask() -> Setup:
    loss = lambda m, b: ms.cross_entropy(m(b[0]), b[1])  # noqa: E731
    return Setup(s.mlp(), s.pairs(), loss, ms.rows())


@fault("count", "says it is a sum over")
def a_count_that_forgets_the_shift() -> Setup:
    setup = sound.language_model_with_shifted_labels()
    setup.count = ms.targets(key=1)
    return setup


@fault("count", "0.3333 = 1 / number of microbatches")
def a_count_that_is_one() -> Setup:
    return Setup(s.mlp(), s.pairs(), s.summed, lambda _: 1)


@fault("count", "something else")
def class_weights_that_are_not_counted() -> Setup:
    weight = torch.tensor([0.5, 1.0, 2.0, 4.0])

    def loss(model: nn.Module, batch: Any) -> ms.LossSum:
        mean = F.cross_entropy(model(batch[0]), batch[1], weight=weight)
        return ms.LossSum.from_mean(mean, int((batch[1] != -100).sum()))

    return Setup(s.mlp(), s.pairs(), loss)


# -- the rest ---------------------------------------------------------------------------------


class NeedsTwo(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 2:
            raise ValueError("needs two rows")
        return x


@fault("size", "needs two rows")
def a_model_that_refuses_one_row() -> Setup:
    return Setup(s.mlp(NeedsTwo()), s.pairs(), s.summed, ms.targets())


class Langevin(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(0.01 * next(_NOISE))


_NOISE = iter(torch.randn(100_000, generator=torch.Generator().manual_seed(0)).tolist())


@fault("update", "does not even make the same update twice")
def an_optimizer_with_noise_of_its_own() -> Setup:
    optimizer = lambda m: Langevin(m.parameters(), lr=0.1)  # noqa: E731
    return Setup(s.mlp(), s.pairs(), s.summed, ms.targets(), optimizer)


@fault("loss", "does not depend on the rows")
def a_penalty_on_weights_in_every_microbatch() -> Setup:
    def loss(model: Any, batch: Any) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return s.summed(model, batch) + 0.1 * penalty

    return Setup(s.mlp(), s.pairs(), loss, ms.targets())


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_with_its_cause(name: str) -> None:
    make, kind, words = FAULTS[name]
    certificate = make().verify()
    assert not certificate.equal, str(certificate)
    assert certificate.exit_code == 1
    assert certificate.reasons[0].kind == kind, str(certificate)
    assert words in certificate.reasons[0].what + certificate.reasons[0].why, str(certificate)


def test_every_layer_is_named_and_only_the_innermost() -> None:
    (reason,) = batch_norm_twice_in_a_convolutional_net().verify().reasons
    assert reason.names == ("features.1", "features.4")


def test_a_layer_and_a_loss_that_both_cross_rows_are_both_named() -> None:
    certificate = batch_norm_and_a_contrastive_loss().verify()
    assert [reason.kind.value for reason in certificate.reasons] == ["layers", "loss"]


def test_a_mean_over_nothing_that_is_counted_is_a_reason_of_its_own() -> None:
    x, y = s.pairs()
    y[0] = -100  # so that a microbatch of this row alone is 0/0
    certificate = Setup(
        s.mlp(), (x, y), lambda m, b: ms.LossSum.from_mean(s.mean(m, b), len(b[1]))
    ).verify()
    assert {reason.kind.value for reason in certificate.reasons} == {"count"}
    assert "is not finite, and `count` finds 1 for `loss`" in certificate.reasons[-1].what


def test_there_are_more_than_twenty() -> None:
    assert len(FAULTS) >= 20


@pytest.mark.parametrize("seed", [0, 2, 29, 57, 65, 135, 171, 187, 201, 227])
def test_noise_that_is_small_by_chance_gets_no_certificate(seed: int) -> None:
    """Two goes of a coin are alike in half of all cases, and of dice nearly so in some."""
    dice = random.Random(seed)
    roll = (lambda: dice.choice((1.0, 1.3))) if seed % 2 else (lambda: 1 + dice.random())
    loss = lambda m, b: s.summed(m, b) * roll()  # noqa: E731
    assert not Setup(s.mlp(), s.pairs(), loss, ms.targets()).verify().equal
