"""Counts and weights read from graphs, against closed forms in float64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from midstep.auditing.events import Backward, Term
from midstep.auditing.recorder.watching import watch

torch.manual_seed(0)
LOGITS = torch.randn(6, 5, dtype=torch.float64)
TARGETS = torch.tensor([0, 1, -100, 3, -100, 4])
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)


def terms_of(loss: Callable[[Tensor], Tensor], scale: float = 1.0) -> tuple[Term, ...]:
    """The terms of a loss of leaf logits, as the recorder reads them in one backward."""
    logits = torch.nn.Parameter(LOGITS.clone())
    optimizer = torch.optim.SGD([logits], lr=0.1)
    with watch() as recorder:
        loss(logits).backward(torch.tensor(scale, dtype=torch.float64))
        assert recorder.num_unmeasured == 0
    del optimizer
    (backward,) = (event for event in recorder.events if isinstance(event, Backward))
    return backward.terms


def squares(x: Tensor) -> Tensor:
    return x.square().sum(dim=1)


@pytest.mark.parametrize(
    ("loss", "count", "weight"),
    [
        (lambda x: F.cross_entropy(x, TARGETS), 4, 1),
        (lambda x: F.cross_entropy(x, TARGETS) / 8, 4, 1 / 8),
        (lambda x: F.cross_entropy(x, TARGETS, reduction="sum") / 4, 4, 1 / 4),
        (lambda x: F.cross_entropy(x, TARGETS, WEIGHTS), 1 + 2 + 4 + 5, 1),
        (lambda x: F.cross_entropy(x, TARGETS, WEIGHTS, reduction="sum"), 12, 1),
        (lambda x: torch.nn.NLLLoss()(x.log_softmax(1), TARGETS) * 0.5, 4, 0.5),
        (lambda x: F.mse_loss(x, LOGITS), 30, 1),
        (lambda x: F.smooth_l1_loss(x, LOGITS, reduction="sum"), 30, 1),
        (lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)) / 2, 30, 0.5),
        (lambda x: squares(x).mean(), 6, 1),
        (lambda x: (squares(x) * MASK).sum() / MASK.sum(), 3, 1 / 3),
        (lambda x: (MASK * squares(x)).sum().div(4), 3, 1 / 4),
        (lambda x: torch.where(MASK > 0, squares(x), 0.0).sum(), 3, 1),
        (lambda x: squares(x).masked_fill(MASK == 0, 0.0).sum(), 3, 1),
        (lambda x: squares(x)[MASK > 0].sum() / 7, 3, 1 / 7),
        (lambda x: F.cross_entropy(x, TARGETS, reduction="none").sum() / 4, 4, 1 / 4),
    ],
)
def test_a_term_has_the_count_and_the_weight_of_its_closed_form(
    loss: Callable[[Tensor], Tensor], count: float, weight: float
) -> None:
    (term,) = terms_of(loss)
    assert term.count == pytest.approx(count, rel=1e-12)
    assert term.weight == pytest.approx(weight, rel=1e-12)


def test_the_seed_of_the_backward_is_in_the_weight() -> None:
    (term,) = terms_of(lambda x: F.cross_entropy(x, TARGETS) / 2, scale=1024.0)
    assert term.weight == 512.0


def test_every_term_of_a_sum_has_its_own_weight() -> None:
    terms = terms_of(lambda x: (F.cross_entropy(x, TARGETS) + 0.1 * x.square().mean()) / 4)
    assert [term.count for term in terms] == [4, 30]
    assert [term.weight for term in terms] == pytest.approx([0.25, 0.025])


def test_the_mean_of_a_list_of_losses_is_the_losses() -> None:
    def loss(x: Tensor) -> Tensor:
        return torch.stack([F.cross_entropy(x[:3], TARGETS[:3]), squares(x[3:]).mean()]).mean()

    terms = terms_of(loss)
    assert [(term.count, term.weight) for term in terms] == [(2, 0.5), (3, 0.5)]


def test_what_is_not_linear_is_marked() -> None:
    (term,) = terms_of(lambda x: squares(x).mean().exp())
    assert not term.is_linear


def test_a_comparison_of_rows_with_each_other_is_seen() -> None:
    (term,) = terms_of(lambda x: F.cross_entropy(x @ x.T, torch.arange(6)))
    assert term.compares_rows
    (term,) = terms_of(lambda x: F.cross_entropy(x @ x.T, torch.arange(6).roll(1)))
    assert not term.compares_rows
