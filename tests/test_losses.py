"""Loss sums divide to torch's own means, gradient included, in every layout torch knows."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import midstep as ms


def gradient_of(loss: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(loss, logits)[0]


def check(logits: Tensor, loss: ms.LossSum, mean: Tensor) -> None:
    """`sum / count` must be torch's mean, and its gradient that of torch's mean."""
    ours = loss.sum / loss.count
    assert ours.shape == ()
    assert ours.item() == pytest.approx(mean.item(), rel=1e-12)
    gap = (gradient_of(ours, logits) - gradient_of(mean, logits)).abs().max()
    assert gap < 1e-14


def classes(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(3, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.3] = -100
    labels.view(-1)[0] = 1
    return logits, labels


WEIGHT = torch.tensor([0.5, 2.0, 0.0], dtype=torch.float64)


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    weighted=st.booleans(),
    ignore_index=st.sampled_from([-100, 0]),
    seed=st.integers(0, 1_000),
)
def test_indices_with_classes_last(
    *, shape: list[int], smoothing: float, weighted: bool, ignore_index: int, seed: int
) -> None:
    logits, labels = classes(*shape, seed=seed)
    labels = torch.where(labels == -100, ignore_index, labels)
    settings: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": smoothing,
        "weight": WEIGHT + 0.25 if weighted else None,
    }
    if (labels == ignore_index).all():
        labels.view(-1)[0] = 2
    mean = F.cross_entropy(logits.reshape(-1, 3), labels.reshape(-1), **settings)
    check(logits, ms.cross_entropy(logits, labels, **settings), mean)


@pytest.mark.parametrize("extra", [(2,), (2, 4)])
@pytest.mark.parametrize("weighted", [True, False])
def test_torchs_own_layout_with_classes_second(extra: tuple[int, ...], weighted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, *extra, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    labels = torch.randint(3, (5, *extra), generator=generator)
    labels[0] = -100
    weight = WEIGHT if weighted else None
    mean = F.cross_entropy(logits, labels, weight=weight, label_smoothing=0.1)
    loss = ms.cross_entropy(logits, labels, weight=weight, label_smoothing=0.1)
    check(logits, loss, mean)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [True, False])
def test_probabilities_as_labels_are_all_counted(smoothing: float, weighted: bool) -> None:
    logits, _ = classes(4, 2)
    labels = torch.softmax(torch.randn(4, 2, 3, dtype=torch.float64), dim=-1)
    settings: dict[str, Any] = {
        "label_smoothing": smoothing,
        "weight": WEIGHT if weighted else None,
    }
    mean = F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1), **settings)
    loss = ms.cross_entropy(logits, labels, **settings)
    assert loss.count == 8
    check(logits, loss, mean)


def test_one_row_without_a_batch_dimension() -> None:
    logits = torch.randn(3, dtype=torch.float64, requires_grad=True)
    label = torch.tensor(1)
    check(logits, ms.cross_entropy(logits, label), F.cross_entropy(logits, label))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(2, 5), (5,), (2, 3, 4)])
def test_the_causal_shift_scores_each_position_against_the_next_label(
    shape: tuple[int, ...], weighted: bool
) -> None:
    logits, labels = classes(*shape)
    labels[..., -1] = 0
    weight = WEIGHT if weighted else None
    mean = F.cross_entropy(
        logits[..., :-1, :].reshape(-1, 3), labels[..., 1:].reshape(-1), weight=weight
    )
    loss = ms.cross_entropy(logits, labels, weight=weight, shift=True)
    check(logits, loss, mean)
    assert torch.as_tensor(loss.count).item() == pytest.approx(
        ms.targets(shift=True, weight=weight)(labels)
    )


def test_the_shift_goes_for_probabilities_too() -> None:
    logits, _ = classes(2, 4)
    labels = torch.softmax(torch.randn(2, 4, 3, dtype=torch.float64), dim=-1)
    mean = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(0, 1))
    check(logits, ms.cross_entropy(logits, labels, shift=True), mean)


@pytest.mark.parametrize(
    ("logits", "labels", "shift"),
    [
        (torch.zeros(4, 3), torch.zeros(5).long(), False),
        (torch.zeros(4, 3), torch.zeros(4, 2).long(), False),
        (torch.zeros(4, 3), torch.zeros(4, 3).long(), False),
        (torch.zeros(2, 3, 5), torch.zeros(2, 4).long(), False),
        (torch.zeros(4, 3), torch.zeros(4, 2), False),
        (torch.zeros(4), torch.zeros(4).long(), True),
        (torch.zeros(2, 5, 3), torch.zeros(2, 4).long(), True),
        (torch.zeros(2, 3, 5), torch.zeros(2, 5).long(), True),
    ],
)
def test_shapes_that_fit_no_layout_are_refused(logits: Tensor, labels: Tensor, shift: bool) -> None:
    with pytest.raises(ValueError, match="do not fit logits"):
        ms.cross_entropy(logits, labels, shift=shift)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [True, False])
def test_half_precision_logits_are_summed_in_float32(dtype: torch.dtype, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, 3, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(3, (20_000,), generator=generator)
    weight = torch.tensor([0.5, 2.0, 1.0]) if weighted else None
    loss = ms.cross_entropy(logits, labels, weight=None if weight is None else weight.to(dtype))
    exact = F.cross_entropy(
        logits.double(),
        labels,
        reduction="sum",
        weight=None if weight is None else weight.double(),
    )
    assert loss.sum.dtype == torch.float32
    assert loss.sum.item() == pytest.approx(exact.item(), rel=1e-5)
    assert gradient_of(loss.sum, logits).dtype == dtype


def test_no_target_is_a_sum_of_nothing_and_not_nan() -> None:
    logits = torch.randn(4, 3, requires_grad=True)
    loss = ms.cross_entropy(logits, torch.full((4,), -100), weight=torch.ones(3))
    assert (loss.sum.item(), float(loss.count)) == (0.0, 0.0)
    assert gradient_of(loss.sum, logits).abs().max() == 0.0


def test_from_mean_takes_back_the_division_and_keeps_the_graph() -> None:
    x = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    loss = ms.LossSum.from_mean(x.mean(), 3)
    assert loss.sum.item() == pytest.approx(9.0)
    assert gradient_of(loss.sum, x).tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert ms.LossSum.from_mean(torch.tensor(float("nan")), 0).count == 0


def test_the_mean_of_one_microbatch_is_only_for_looking() -> None:
    x = torch.tensor(6.0, requires_grad=True)
    mean = ms.LossSum(x * 1.0, 3).mean()
    assert mean.item() == 2.0
    assert not mean.requires_grad
