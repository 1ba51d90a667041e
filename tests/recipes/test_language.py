"""The built-in recipe: what it is made of, and that it learns."""

import collections
import math

import pytest
import torch

import midstep as ms
from midstep.precision import FP32
from midstep.recipes.corpus import language_corpus
from midstep.recipes.gpt import GPTConfig
from midstep.recipes.held_out import measure
from midstep.recipes.language import language
from midstep.recipes.language import recipe as usual


def small(seed: int) -> ms.Recipe:
    return language(seed=seed, config=GPTConfig(width=32, depth=1, num_heads=2), context=64)


@pytest.fixture(scope="module")
def recipe() -> ms.Recipe:
    return small(0)


def test_a_loss_is_a_sum_over_what_the_count_counts(recipe: ms.Recipe) -> None:
    batch = next(iter(recipe.train))
    loss = recipe.loss(recipe.model, batch)
    assert isinstance(loss, ms.LossSum)
    assert recipe.count is not None
    assert loss.count == recipe.count(batch) == (batch["labels"][:, 1:] != -100).sum().item()
    logits = recipe.model(batch["input_ids"], batch["document_ids"])
    log_p = logits.double().log_softmax(-1)
    due = sum(
        -log_p[row, t, batch["labels"][row, t + 1]].item()
        for row in range(len(batch["labels"]))
        for t in range(63)
        if batch["labels"][row, t + 1] != -100
    )
    assert loss.sum.item() == pytest.approx(due, rel=1e-5)


def test_an_untrained_model_guesses_among_all_bytes(recipe: ms.Recipe) -> None:
    found = measure(recipe, precision=FP32(), step=0, update=0)
    assert found is not None
    assert found.loss_mean == pytest.approx(math.log(256), rel=0.02)


def test_the_baseline_is_that_of_byte_frequencies(recipe: ms.Recipe) -> None:
    train, held_out = language_corpus(context=64, seed=0)
    counts = collections.Counter(train.targets.tolist())
    total = sum(counts.values()) + 256
    due = [-math.log((counts[byte] + 1) / total) for byte in held_out.targets.tolist()]
    assert recipe.baselines == {"byte frequencies": pytest.approx(sum(due) / len(due), rel=1e-12)}


def test_every_parameter_is_stepped_once_and_only_matrices_decay(recipe: ms.Recipe) -> None:
    optimizer = recipe.optimizer(recipe.model, 0.5)
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    assert collections.Counter(map(id, stepped)) == {id(p): 1 for p in recipe.model.parameters()}
    for group in optimizer.param_groups:
        assert group["lr"] == 0.5
        assert {p.ndim >= 2 for p in group["params"]} == {group["weight_decay"] > 0}


def test_the_seed_alone_decides_weights_and_order() -> None:
    torch.manual_seed(99)
    one = small(1)
    torch.rand(5)
    same, other = small(1), small(2)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            one.model.state_dict().values(), same.model.state_dict().values(), strict=True
        )
    )
    assert not torch.equal(next(one.model.parameters()), next(other.model.parameters()))
    first, again, different = (next(iter(r.train))["input_ids"] for r in (one, same, other))
    assert torch.equal(first, again)
    assert not torch.equal(first, different)


def test_a_few_updates_learn_more_than_byte_frequencies_know(recipe: ms.Recipe) -> None:
    made = small(0)
    updater = ms.Updater(made.model, made.optimizer(made.model, 0.01), clip=made.clip)
    while updater.clock.step < 60:
        for window in updater.windows(made.train, size=4, count=made.count):
            updater.update(window, made.loss)
            if updater.clock.step == 60:
                break
    found = measure(made, precision=FP32(), step=60, update=60)
    assert found is not None
    assert found.loss_mean < made.baselines["byte frequencies"] - 0.2
    assert recipe.baselines == made.baselines


def test_the_usual_size_is_that_of_the_default_config() -> None:
    made = usual(0)
    assert made.size == 4
    assert made.steps == 400
    assert sum(p.numel() for p in made.model.parameters()) > 500_000
    schedule = made.schedule
    assert schedule is not None
    rates = [schedule(200)(step) for step in range(200)]
    assert max(rates) == 1.0
    assert rates[0] == pytest.approx(1 / 20)
    assert rates[-1] == pytest.approx(0.1)
