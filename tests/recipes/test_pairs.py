"""The recipe `pairs`: no title twice in a batch, no passage on both sides, and that it learns."""

import collections
import copy
import math

import pytest
import torch

import midstep as ms
from midstep.precision import FP32
from midstep.recipes.held_out import measure
from midstep.recipes.pairs import contrastive, pairs
from midstep.recipes.pairs import recipe as usual
from midstep.recipes.passages import DistinctTitles, Split, loader, pairs_of, sections


@pytest.fixture(scope="module")
def split() -> Split:
    return pairs_of(sections())


def test_no_passage_is_on_both_sides_and_every_held_out_title_was_trained(split: Split) -> None:
    train, held_out = split
    seen = {tuple(ids) for ids in train.passage_ids.tolist()}
    shared = [ids for ids in held_out.passage_ids.tolist() if tuple(ids) in seen]
    assert len(shared) <= len(held_out) // 100  # a table repeats itself, word for word
    assert set(held_out.titles) <= set(train.titles)
    assert len(held_out) == pytest.approx(len(train) / 4, rel=0.2)
    assert len(set(train.titles)) > 100


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_no_title_comes_twice_in_a_batch_and_every_pair_once_an_epoch(
    split: Split, seed: int | None
) -> None:
    order = None if seed is None else torch.Generator().manual_seed(seed)
    sampler = DistinctTitles(split.train.titles, rows=32, generator=order)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert collections.Counter(i for b in batches for i in b) == dict.fromkeys(
        range(len(split.train)), 1
    )
    for batch in batches:
        titles = [split.train.titles[i] for i in batch]
        assert len(set(titles)) == len(titles)
    sizes = {len(batch) for batch in batches}
    assert max(sizes) <= 32
    assert max(sizes) - min(sizes) <= 1


def test_each_epoch_has_another_order_that_the_seed_decides(split: Split) -> None:
    def epochs(seed: int) -> list[list[int]]:
        order = torch.Generator().manual_seed(seed)
        sampler = DistinctTitles(split.train.titles, rows=32, generator=order)
        return [next(iter(sampler)) for _ in range(2)]

    assert epochs(0) == epochs(0)
    assert epochs(0)[0] != epochs(0)[1]
    assert epochs(0) != epochs(1)


def test_to_measure_leaves_the_global_stream_alone(split: Split) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    list(loader(split.held_out, rows=32, generator=None))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_loss_asks_both_ways() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 5, dtype=torch.float64)
    rows = [logits[i, i] - logits[i].logsumexp(0) for i in range(5)]
    columns = [logits[i, i] - logits[:, i].logsumexp(0) for i in range(5)]
    found = contrastive(logits)
    assert found.sum.item() == pytest.approx(-(sum(rows) + sum(columns)).item() / 2, rel=1e-12)
    assert found.count == 5


def test_padding_changes_no_point() -> None:
    torch.manual_seed(0)
    model = pairs(seed=0, width=8).model
    ids = torch.tensor([[5, 9, 7]])
    padded = torch.tensor([[5, 9, 7, 0, 0]])
    assert torch.allclose(model.titles(ids), model.titles(padded))


def test_the_baseline_is_a_guess_among_the_rows_of_a_held_out_batch() -> None:
    made = usual(0)
    sizes = [len(batch["title_ids"]) for batch in made.held_out or ()]
    due = sum(n * math.log(n) for n in sizes) / sum(sizes)
    assert made.baselines == {"guessing": pytest.approx(due, rel=1e-12)}
    trained = [len(batch["title_ids"]) for batch in made.train]
    assert max(sizes) - min(trained) <= 3  # so that the two losses are of one scale


def test_forty_updates_match_far_better_than_guessing() -> None:
    made = usual(0)
    updater = ms.Updater(made.model, made.optimizer(made.model, made.lr), clip=made.clip)
    while updater.clock.step < 40:
        for window in updater.windows(made.train, size=made.size, count=made.count):
            updater.update(window, made.loss)
    found = measure(made, precision=FP32(), step=40, update=40)
    assert found is not None
    assert found.loss_mean < made.baselines["guessing"] / 2


def test_a_cut_asks_another_question_and_the_summary_says_so() -> None:
    made = usual(0)
    batch = next(iter(made.train))
    twin = copy.deepcopy(made.model).double()

    def gradient(*pieces: slice) -> torch.Tensor:
        twin.zero_grad()
        for piece in pieces:
            loss = contrastive(twin(batch["title_ids"][piece], batch["passage_ids"][piece]))
            (loss.sum / len(batch["title_ids"])).backward()
        return torch.cat([p.grad.flatten() for p in twin.parameters()])

    whole, cut = gradient(slice(None)), gradient(slice(0, 15), slice(15, None))
    assert ((whole - cut).norm() / whole.norm()).item() > 0.05
    (note,) = made.notes
    assert "compares the rows of one forward" in note
