"""Clipping by value: entry by entry, which is another direction."""

import math

import pytest
import torch
from clipping import Passes, grads_of, with_gradients
from torch import nn

from midstep.clip import Attempt, ByValue, Decision
from midstep.gradients import Gradients


def clip(parameters: list[nn.Parameter], bound: float, *, factor: float = 1.0) -> Decision:
    gradients = Gradients(parameters, factor=factor)
    decision = ByValue(bound).decide(gradients, Attempt(step=0))
    gradients.apply_()
    return decision


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_entry_is_bounded_and_the_others_keep_every_bit(dtype: torch.dtype) -> None:
    grad = (torch.randn(1_000, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    parameters = with_gradients(grad.clone(), grad.clone().view(10, 100).t())
    assert clip(parameters, 1.0).clipped
    expected = torch.minimum(torch.maximum(grad, -torch.ones_like(grad)), torch.ones_like(grad))
    flat, transposed = grads_of(parameters)
    assert torch.equal(flat, expected)
    assert torch.equal(transposed, expected.view(10, 100).t())


def test_it_is_not_the_direction_of_norm_clipping() -> None:
    parameters = with_gradients(torch.tensor([3.0, 4.0]))
    assert clip(parameters, 1.0) == Decision(clipped=True, coefficient=None, threshold=1.0)
    assert grads_of(parameters)[0].tolist() == [1.0, 1.0]


def test_an_entry_on_the_bound_changes_nothing_and_costs_one_read() -> None:
    parameters = with_gradients(torch.tensor([0.5, -1.0, 1.0]))
    with Passes([p.grad for p in parameters if p.grad is not None]) as passes:
        assert clip(parameters, 1.0) == Decision(clipped=False, coefficient=1.0, threshold=1.0)
    assert passes.num == 1
    assert grads_of(parameters)[0].tolist() == [0.5, -1.0, 1.0]


def test_tensors_within_the_bound_are_not_passed_over_again() -> None:
    parameters = with_gradients(torch.full((100,), 2.0), torch.full((300,), 0.5))
    with Passes([p.grad for p in parameters if p.grad is not None]) as passes:
        clip(parameters, 1.0)
    assert passes.num == 1 + 2 * 0.25


def test_the_bound_is_on_the_true_gradient() -> None:
    parameters = with_gradients(torch.tensor([3072.0, -512.0]))
    assert clip(parameters, 1.0, factor=1 / 1024).clipped
    assert grads_of(parameters)[0].tolist() == [1.0, -0.5]
    parameters = with_gradients(torch.tensor([0.75]))
    assert clip(parameters, 1.0, factor=-2.0).clipped
    assert grads_of(parameters)[0].tolist() == [-1.0]


def test_complex_entries_are_bounded_by_their_parts() -> None:
    parameters = with_gradients(torch.tensor([3 - 0.5j, -0.1 - 4j, 0.2 + 0.3j]))
    assert clip(parameters, 1.0).clipped
    assert torch.equal(grads_of(parameters)[0], torch.tensor([1 - 0.5j, -0.1 - 1j, 0.2 + 0.3j]))


def test_a_modulus_above_the_bound_whose_parts_are_within_is_not_clipped() -> None:
    parameters = with_gradients(torch.tensor([0.9 + 0.9j]), torch.tensor([0.1]))
    before = grads_of(parameters)
    assert not clip(parameters, 1.0).clipped
    assert all(torch.equal(a, b) for a, b in zip(before, grads_of(parameters), strict=True))
    assert clip(parameters, 1.0, factor=2.0).clipped


def test_a_lazily_conjugated_gradient_is_bounded() -> None:
    parameters = with_gradients(torch.tensor([3 + 4j]).conj())
    assert clip(parameters, 1.0).clipped
    assert grads_of(parameters)[0].tolist() == [1 - 1j]


def test_sparse_entries_are_bounded_as_sums() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.sparse_coo_tensor(
        [[0, 0, 2]], torch.tensor([0.8, 0.8, 0.5]), (3,), check_invariants=True
    )
    assert clip([parameter], 1.0).clipped
    assert parameter.grad.to_dense().tolist() == [1.0, 0.0, 0.5]


def test_an_infinite_entry_would_become_finite() -> None:
    # Why the finite check comes first: afterwards there is nothing to see.
    parameters = with_gradients(torch.tensor([0.5, torch.inf, -torch.inf]))
    assert clip(parameters, 1.0).clipped
    assert grads_of(parameters)[0].tolist() == [0.5, 1.0, -1.0]


def test_the_bound_may_follow_a_schedule() -> None:
    parameters = with_gradients(torch.tensor([3.0]))
    rule = ByValue(lambda step: 2.0 / (1 + step))
    assert rule.decide(Gradients(parameters), Attempt(step=3)).threshold == 0.5
    assert grads_of(parameters)[0].tolist() == [0.5]


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_a_bound_that_is_not_above_zero_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"`ByValue\(max_value=.*\)`: must be greater than 0"):
        ByValue(bad)


def test_empty_and_missing_gradients_are_no_trouble() -> None:
    parameters = with_gradients(torch.zeros(0), torch.zeros(0, dtype=torch.complex64))
    assert not clip(parameters, 1.0).clipped
    assert not clip([nn.Parameter(torch.zeros(1))], 1.0).clipped
