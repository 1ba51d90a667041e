"""The recipe `digits`: what is held out, that it learns, and where its equality ends."""

import builtins
import collections
import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import midstep as ms
from midstep.errors import RecipeError
from midstep.precision import FP32
from midstep.recipes.digits import digits, images
from midstep.recipes.digits import recipe as usual
from midstep.recipes.held_out import measure

datasets = pytest.importorskip("sklearn.datasets")


def test_the_last_fifth_is_held_out_and_nothing_is_lost() -> None:
    data = datasets.load_digits()
    train, held_out = images()
    assert len(train) + len(held_out) == len(data.target) == 1797
    pixels = torch.cat([train.images, held_out.images])
    assert torch.equal(pixels.squeeze(1).double() * 16, torch.from_numpy(data.images))
    assert torch.cat([train.labels, held_out.labels]).tolist() == data.target.tolist()


def test_a_loss_is_a_sum_over_the_rows() -> None:
    made = digits(seed=0, width=4)
    batch = next(iter(made.train))
    loss = made.loss(made.model, batch)
    assert isinstance(loss, ms.LossSum)
    assert made.count is not None
    assert loss.count == made.count(batch) == 32
    due = F.cross_entropy(made.model(batch["images"]), batch["labels"], reduction="sum")
    assert loss.sum.item() == pytest.approx(due.item(), rel=1e-5)


def test_the_baselines_are_those_of_frequencies_and_of_a_linear_discriminant() -> None:
    train, held_out = images()
    counts = collections.Counter(train.labels.tolist())
    due = [-math.log(counts[digit] / len(train)) for digit in held_out.labels.tolist()]
    baselines = usual(0).baselines
    assert baselines["class frequencies"] == pytest.approx(sum(due) / len(due), rel=1e-9)
    x, y = train.images.double().flatten(1), train.labels
    means = torch.stack([x[y == digit].mean(0) for digit in range(10)])
    spread = sum(torch.outer(v, v) for v in x - means[y]) / len(x)
    spread += 0.01 * torch.eye(64, dtype=torch.float64)
    normal = torch.distributions.MultivariateNormal(means, spread)
    log_p = normal.log_prob(held_out.images.double().flatten(1).unsqueeze(1)).log_softmax(1)
    found = -log_p[torch.arange(len(held_out)), held_out.labels].mean().item()
    assert baselines["a linear discriminant"] == pytest.approx(found, rel=1e-9)


def test_sixty_updates_see_more_than_a_linear_discriminant() -> None:
    made = usual(0)
    updater = ms.Updater(made.model, made.optimizer(made.model, made.lr), clip=made.clip)
    while updater.clock.step < 60:
        for window in updater.windows(made.train, size=made.size, count=made.count):
            updater.update(window, made.loss)
    found = measure(made, precision=FP32(), step=60, update=60)
    assert found is not None
    assert found.loss_mean < made.baselines["a linear discriminant"] - 0.1


@pytest.mark.parametrize("is_exact", [False, True])
def test_batch_norm_ends_the_equality_and_group_norm_gives_it_back(is_exact: bool) -> None:
    if is_exact:
        made = digits(seed=0, width=8, norm=lambda channels: nn.GroupNorm(4, channels))
    else:
        made = digits(seed=0, width=8)
    assert bool(made.notes) is not is_exact
    batches = [b for b, _ in zip(made.train, range(4), strict=False)]
    pixels = torch.cat([b["images"] for b in batches]).double()
    labels = torch.cat([b["labels"] for b in batches])
    twin = copy.deepcopy(made.model).double()
    F.cross_entropy(twin(pixels), labels).backward()
    whole = torch.cat([p.grad.flatten() for p in twin.parameters()])
    twin.zero_grad()
    for batch in batches:
        loss_sum = F.cross_entropy(twin(batch["images"].double()), batch["labels"], reduction="sum")
        (loss_sum / 128).backward()
    pieces = torch.cat([p.grad.flatten() for p in twin.parameters()])
    gap = ((whole - pieces).norm() / whole.norm()).item()
    assert gap < 1e-12 if is_exact else gap > 0.01


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def missing(name: str, *rest: object) -> object:
        if name.startswith("sklearn"):
            raise ModuleNotFoundError(name)
        return found(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(RecipeError, match=r"pip install 'midstep\[digits\]'"):
        images()
