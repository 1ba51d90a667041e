"""Several loss terms on several ranks: each has one denominator, that of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.models import WRAPPINGS, gradients, plain_model, worst
from distributed.processes import outcomes_of, run
from torch import Tensor, nn

import midstep as ms

pytestmark = pytest.mark.distributed

# Rows by rank and batch, and which terms a batch counts.
LOADS: dict[str, list[list[tuple[int, tuple[str, ...]]]]] = {
    "both terms everywhere": [[(2, ("lm", "aux"))] * 3, [(3, ("lm", "aux"))]],
    "a rank without data from the first window on": [[(2, ("lm", "aux"))] * 4, []],
    "a rank that counts one term only": [[(2, ("lm",))] * 3, [(1, ("lm", "aux"))] * 3],
    "terms no rank shares": [[(2, ("lm",))] * 2, [(1, ("aux",))] * 4],
    "terms that change from window to window": [
        [(2, ("lm",)), (1, ("lm",)), (2, ("aux",)), (1, ("aux", "third"))],
        [(1, ("lm", "aux"))] * 5,
    ],
}


def data_of(load: str, rank: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        {"x": torch.randn(rows, 6, generator=generator, dtype=torch.float64), "terms": terms}
        for rows, terms in LOADS[load][rank]
    ]


def count(batch: dict[str, Any]) -> dict[str, float]:
    """Tokens for the first term, rows for the second, a weight for the third."""
    rows = len(batch["x"])
    counts = {"lm": 4.0 * rows, "aux": rows, "third": 0.25 * rows}
    return {term: counts[term] for term in batch["terms"]}


def losses(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    outputs = model(batch["x"])
    found = {
        "lm": outputs.square().sum(),
        "aux": outputs[:, 0].exp().sum(),
        "third": outputs.sum(),
    }
    return {term: found[term] for term in batch["terms"]}


def train(rank: int, size: int, wrapping: str, load: str) -> list[Any]:
    del size
    wrapped = WRAPPINGS[wrapping](plain_model())
    updater = ms.Updater(wrapped.model, torch.optim.SGD(wrapped.model.parameters(), lr=0.0))
    found = []
    for window in updater.windows(data_of(load, rank), size=2, count=count):
        record = updater.update(window, losses)
        found.append((gradients(wrapped.model), record))
    return found


def wanted(load: str) -> list[tuple[list[Tensor], dict[str, float], dict[str, float]]]:
    """Each window of all ranks on one process: every term's sum over its own denominator."""
    found = []
    parts = [data_of(load, rank) for rank in range(2)]
    for start in range(0, max(map(len, parts)), 2):
        model = plain_model()
        window = [batch for part in parts for batch in part[start : start + 2]]
        sums: dict[str, Tensor] = {}
        totals: dict[str, float] = {}
        for batch in window:
            for term, value in losses(model, batch).items():
                sums[term] = sums.get(term, torch.zeros(())) + value
                totals[term] = totals.get(term, 0.0) + count(batch)[term]
        sum(value / totals[term] for term, value in sums.items()).backward()
        means = {term: value.item() / totals[term] for term, value in sums.items()}
        found.append(([p.grad for p in model.parameters()], totals, means))
    return found


@pytest.mark.parametrize("wrapping", ["DDP", "FSDP2"])
@pytest.mark.parametrize("load", LOADS)
def test_each_term_is_divided_by_its_own_count_on_all_ranks(load: str, wrapping: str) -> None:
    for found in run(train, wrapping, load, size=2):
        for (grads, record), (true, totals, means) in zip(found, wanted(load), strict=True):
            assert worst(grads, true) < 1e-14
            assert record.denominators == totals
            assert record.loss_means == pytest.approx(means, rel=1e-12)


def two_passes(rank: int, size: int) -> list[dict[str, float]]:
    """Another count in the next pass, on a rank that meanwhile has no batch."""
    del size
    wrapped = WRAPPINGS["DDP"](plain_model())
    updater = ms.Updater(wrapped.model, torch.optim.SGD(wrapped.model.parameters(), lr=0.0))
    rows = [torch.ones(2, 6, dtype=torch.float64)]
    found = []
    for data, own_count in ((rows, ms.rows()), (rows * (1 - rank), count_tokens), (rows, None)):
        for window in updater.windows(data, size=1, count=own_count):
            record = updater.update(window, named_loss if own_count is count_tokens else bare_loss)
            found.append(record.denominators)
    return found


def count_tokens(batch: Tensor) -> dict[str, float]:
    return {"tokens": 3.0 * len(batch)}


def named_loss(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    return {"tokens": model(batch).sum()}


def bare_loss(model: nn.Module, batch: Tensor) -> ms.LossSum:
    return ms.LossSum(model(batch).sum(), len(batch))


def test_a_term_of_an_earlier_pass_does_not_linger() -> None:
    for found in run(two_passes, size=2):
        assert found == [{"loss": 4}, {"tokens": 6}, {"loss": 4}]


def many_terms(rank: int, size: int, num_terms: int) -> dict[str, float]:
    del size
    wrapped = WRAPPINGS["DDP"](plain_model())
    updater = ms.Updater(wrapped.model, torch.optim.SGD(wrapped.model.parameters(), lr=0.0))
    names = [f"term {index}" for index in range(num_terms)]
    record = updater.update(
        [torch.ones(2, 6, dtype=torch.float64)] * (1 - rank),
        lambda m, x: {name: m(x).sum() for name in names},
        count=lambda x: {name: len(x) + index for index, name in enumerate(names)},
    )
    return dict(record.denominators)


@pytest.mark.parametrize("num_terms", [16, 17])
def test_more_terms_than_travel_together_are_counted_all_the_same(num_terms: int) -> None:
    for found in run(many_terms, num_terms, size=2):
        assert found == {f"term {index}": 2 + index for index in range(num_terms)}


def mix(rank: int, size: int) -> None:
    del size
    wrapped = WRAPPINGS["DDP"](plain_model())
    updater = ms.Updater(wrapped.model, torch.optim.SGD(wrapped.model.parameters(), lr=0.0))
    rows = [torch.ones(2, 6, dtype=torch.float64)]
    for window in updater.windows(rows, size=1, count=ms.rows() if rank else None):
        updater.update(window, bare_loss)


def test_counted_on_one_rank_and_streamed_on_another_is_refused_on_both() -> None:
    for outcome in outcomes_of(mix, size=2):
        assert outcome.error == "WindowError"
        assert outcome.message.startswith("1 of 2 ranks stream their counts")
