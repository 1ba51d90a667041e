"""The reference forms in NumPy: what they are by definition, and the library held against them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import midstep as ms
from midstep import reference, schedules

RNG = np.random.default_rng(7)
HIDDEN = RNG.normal(size=(12, 5))
WEIGHT = RNG.normal(size=(5, 4))
LABELS = np.array([0, 1, -100, 3, 2, -100, 0, 1, 1, 3, 2, 0])


def head(weight: np.ndarray) -> nn.Linear:
    linear = nn.Linear(*weight.shape, bias=False, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(weight).T)
    return linear


def classify(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> ms.LossSum:
    return ms.cross_entropy(model(batch[0]), batch[1])


def microbatches(*sizes: int) -> list[tuple[np.ndarray, np.ndarray]]:
    ends = np.cumsum(sizes)
    return [(HIDDEN[e - n : e], LABELS[e - n : e]) for n, e in zip(sizes, ends, strict=True)]


def tensors(
    batches: list[tuple[np.ndarray, np.ndarray]],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in batches]


def test_the_gradient_of_a_head_is_that_of_finite_differences() -> None:
    gradient, n = reference.output_head_gradient(HIDDEN, WEIGHT, LABELS)
    assert n == 10
    numeric = np.zeros_like(WEIGHT)
    for index in np.ndindex(*WEIGHT.shape):
        step = np.zeros_like(WEIGHT)
        step[index] = 1e-6
        up, down = (reference.loss_mean(HIDDEN, WEIGHT + s, LABELS) for s in (step, -step))
        numeric[index] = (up - down) / 2e-6
    assert np.abs(gradient - numeric).max() < 1e-8


def test_the_gradient_of_a_head_is_that_of_torch() -> None:
    linear = head(WEIGHT)
    F.cross_entropy(linear(torch.from_numpy(HIDDEN)), torch.from_numpy(LABELS)).backward()
    assert linear.weight.grad is not None
    gradient, _ = reference.output_head_gradient(HIDDEN, WEIGHT, LABELS)
    assert np.abs(linear.weight.grad.numpy().T - gradient).max() < 1e-14


@given(cuts=st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_microbatches_join_to_the_gradient_of_all_rows_here_and_in_the_library(
    cuts: list[int],
) -> None:
    sizes = [n for n in cuts if n] + [1]
    total = sum(sizes)
    if total > 12:
        sizes = [12]
    elif total < 12:
        sizes.append(12 - total)
    parts = [reference.output_head_gradient(x, WEIGHT, y) for x, y in microbatches(*sizes)]
    whole, n = reference.output_head_gradient(HIDDEN, WEIGHT, LABELS)
    joined = reference.accumulate((g for g, _ in parts), [n for _, n in parts])
    assert np.abs(joined - whole).max() < 1e-14
    linear = head(WEIGHT)
    updater = ms.Updater(linear, torch.optim.SGD(linear.parameters(), lr=0.0))
    updater.update(tensors(microbatches(*sizes)), classify, count=ms.targets())
    assert linear.weight.grad is not None
    assert np.abs(linear.weight.grad.numpy().T - joined).max() < 1e-14
    assert n == 10


def test_equal_counts_are_a_mean_and_not_a_sum() -> None:
    parts = [np.full(3, value) for value in (1.0, 2.0, 6.0)]
    assert reference.accumulate(parts).tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("counts", [[0, 0], [1]])
def test_nothing_counted_and_a_missing_count_are_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="accumulate"):
        reference.accumulate([np.zeros(1), np.zeros(1)], counts)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_library_trains_a_head_as_the_reference_does(size: int) -> None:
    batches = microbatches(3, 2, 4, 1, 2)
    expected = reference.train(WEIGHT, batches, lr=0.3, size=size)
    linear = head(WEIGHT)
    updater = ms.Updater(
        linear, torch.optim.SGD(linear.parameters(), lr=0.3), empty=ms.Skip(max_consecutive=5)
    )
    for window in updater.windows(tensors(batches), size=size, count=ms.targets()):
        updater.update(window, classify)
    assert np.abs(linear.weight.detach().numpy().T - expected).max() < 1e-13
    assert np.abs(expected - WEIGHT).max() > 1e-2


def test_a_window_without_a_target_makes_no_step_in_the_reference() -> None:
    masked = [(HIDDEN[:2], np.array([-100, -100]))]
    assert np.array_equal(reference.train(WEIGHT, masked, lr=1.0, size=1), WEIGHT)


@given(warmup=st.integers(1, 30), decay=st.integers(1, 60), step=st.integers(0, 120))
def test_the_cosine_of_the_library_is_the_reference_one_update_on(
    warmup: int, decay: int, step: int
) -> None:
    ours = schedules.cosine(total=warmup + decay, warmup=warmup, minimum=0.1)(step)
    theirs = reference.warmup_cosine(
        step + 1, base=1.0, minimum=0.1, warmup=warmup, total=warmup + decay
    )
    assert ours == pytest.approx(theirs, abs=1e-12)


@given(warmup=st.integers(1, 30), step=st.integers(0, 60))
def test_the_warmup_of_the_library_is_the_reference_one_update_on(warmup: int, step: int) -> None:
    ours = schedules.constant(warmup=warmup)(step)
    assert ours == pytest.approx(reference.linear_warmup(step + 1, base=1.0, warmup=warmup))


def test_the_published_cosine_comes_out() -> None:
    rates = [reference.cosine_decay(t, base=0.3, minimum=0.01, total=20) for t in (0, 10, 20, 25)]
    assert rates == pytest.approx([0.3, 0.155, 0.01, 0.01], abs=1e-15)
