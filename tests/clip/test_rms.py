"""Clipping by root mean square: one bound for tensors of every size."""

import math

import pytest
import torch
from clipping import VECTORS, Passes, exact_norm, grads_of, numbers, with_gradients
from torch import nn

from midstep.clip import Attempt, ByRms, ByTensorNorm, Decision
from midstep.gradients import Gradients


def clip(parameters: list[nn.Parameter], max_rms: float) -> Decision:
    gradients = Gradients(parameters)
    decision = ByRms(max_rms).decide(gradients, Attempt(step=0))
    gradients.apply_()
    return decision


def test_a_tensor_is_clipped_as_optax_does() -> None:
    case = VECTORS["adafactor.update"]
    parameters = with_gradients(numbers(case["inputs"]["update"]))
    assert clip(parameters, case["params"]["d"]).clipped
    expected = numbers(case["expected"]["update"])
    torch.testing.assert_close(grads_of(parameters)[0], expected, rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (30, 40), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_tensor_ends_at_the_bound(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = with_gradients((torch.randn(shape, generator=generator) * 9 + 5).to(dtype))
    clip(parameters, 0.25)
    rms = exact_norm(grads_of(parameters)) / math.sqrt(max(1, math.prod(shape)))
    assert rms == pytest.approx(0.25, rel=5e-3 if dtype is torch.bfloat16 else 1e-6)


def test_it_is_clipping_by_tensor_with_a_bound_for_each_size() -> None:
    grads = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (1, 9, 400)]
    for grad in grads:
        a, b = with_gradients(grad.clone(), grad.clone())
        clip([a], 0.5)
        gradients = Gradients([b])
        ByTensorNorm(0.5 * math.sqrt(grad.numel())).decide(gradients, Attempt(step=0))
        gradients.apply_()
        assert torch.equal(grads_of([a])[0], grads_of([b])[0])


def test_a_tensor_on_the_bound_and_one_of_zeros_change_not_one_bit() -> None:
    parameters = with_gradients(torch.full((16,), -0.5), torch.zeros(3), torch.zeros(0))
    decision = clip(parameters, 0.5)
    assert decision == Decision(clipped=False, coefficient=1.0, threshold=0.5)
    assert grads_of(parameters)[0].tolist() == [-0.5] * 16


def test_entries_that_a_sparse_gradient_does_not_store_are_zeros() -> None:
    parameter = nn.Parameter(torch.zeros(8, 2))
    parameter.grad = torch.sparse_coo_tensor(
        [[1]], torch.tensor([[4.0, 0.0]]), (8, 2), check_invariants=True
    )
    assert not clip([parameter], 1.0).clipped  # 4 / sqrt(16) is 1
    assert clip([parameter], 0.5).coefficient == 0.5


def test_it_costs_one_read_and_one_multiplication_of_what_is_clipped() -> None:
    parameters = with_gradients(torch.full((300,), 2.0), torch.full((100,), 0.1))
    with Passes([p.grad for p in parameters if p.grad is not None]) as passes:
        clip(parameters, 1.0)
    assert passes.num == 1.75


def test_the_bound_may_follow_a_schedule() -> None:
    gradients = Gradients(with_gradients(torch.full((4,), 2.0)))
    decision = ByRms(lambda step: 1.0 / step).decide(gradients, Attempt(step=4))
    assert (decision.threshold, decision.coefficient) == (0.25, 0.125)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_a_bound_that_is_not_above_zero_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"`ByRms\(max_rms=.*\)`: must be greater than 0"):
        ByRms(bad)
