"""Adaptive clipping: each unit's gradient against its own weights."""

import math

import pytest
import torch
from clipping import VECTORS, exact_norm, grads_of, numbers, with_gradient, with_gradients
from torch import Tensor, nn

from midstep.clip import Adaptive, Attempt, Decision
from midstep.gradients import Gradients


def clip(parameters: list[nn.Parameter], rule: Adaptive, *, factor: float = 1.0) -> Decision:
    gradients = Gradients(parameters, factor=factor)
    decision = rule.decide(gradients, Attempt(step=0))
    gradients.apply_()
    return decision


def by_definition(weights: Tensor, grad: Tensor, clipping: float, eps: float) -> Tensor:
    """Unit by unit, in float64."""
    weights, grad = weights.detach().double(), grad.double()
    if weights.ndim <= 1:
        return by_definition(weights.view(1, -1), grad.view(1, -1), clipping, eps).view(grad.shape)
    units = []
    for own, unit in zip(weights, grad, strict=True):
        largest = clipping * max(own.norm().item(), eps)
        norm = unit.norm().item()
        units.append(unit * (largest / norm) if norm > largest else unit)
    return torch.stack(units)


def test_every_layout_is_clipped_as_timm_does() -> None:
    case = VECTORS["agc.torch_layout"]
    names = list(case["inputs"]["params"])
    parameters = [
        with_gradient(numbers(case["inputs"]["grads"][n]), numbers(case["inputs"]["params"][n]))
        for n in names
    ]
    rule = Adaptive(case["params"]["clip_factor"], eps=case["params"]["eps"])
    assert clip(parameters, rule).clipped
    for name, grad in zip(names, grads_of(parameters), strict=True):
        expected = numbers(case["expected"]["grads"][name])
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["col", "c3"])
def test_columns_and_conv1d_have_a_unit_for_each_output_and_not_the_units_of_jax(name: str) -> None:
    case = VECTORS["agc.layout_differs"]
    weights, grad = (numbers(case["inputs"][kind][name]) for kind in ("params", "grads"))
    (parameter,) = [with_gradient(grad, weights)]
    clip([parameter], Adaptive(case["params"]["clip_factor"], eps=case["params"]["eps"]))
    ours = grads_of([parameter])[0]
    timm = numbers(case["expected"]["timm_rule"][name])
    torch.testing.assert_close(ours, timm, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(ours, numbers(case["expected"]["optax_rule"][name]), rtol=1e-3)


@pytest.mark.parametrize(
    "shape", [(), (5,), (1, 5), (5, 1), (7, 300), (4, 3, 5), (6, 2, 3, 3), (2,) * 5]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_shape_is_clipped_by_its_units(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(shape, generator=generator, dtype=dtype)
    grad = torch.randn(shape, generator=generator, dtype=dtype) * 0.02
    (parameter,) = [with_gradient(grad.clone(), weights)]
    before = exact_norm([grad])
    decision = clip([parameter], Adaptive(0.02))
    expected = by_definition(weights, grad, 0.02, 1e-3)
    clipped = grads_of([parameter])[0]
    torch.testing.assert_close(clipped.double(), expected, rtol=1e-6, atol=0.0)
    assert decision.coefficient == pytest.approx(exact_norm([clipped]) / before, rel=1e-6)


def test_units_are_whole_across_the_blocks_they_are_read_in() -> None:
    generator = torch.Generator().manual_seed(1)
    for shape in ((2_100, 700), (2, 1_200_000)):
        weights = torch.randn(shape, generator=generator)
        grad = torch.randn(shape, generator=generator) * 0.01
        (parameter,) = [with_gradient(grad.clone(), weights)]
        clip([parameter], Adaptive(0.01))
        expected = by_definition(weights, grad, 0.01, 1e-3)
        torch.testing.assert_close(grads_of([parameter])[0].double(), expected, rtol=1e-6, atol=0.0)


def test_a_unit_on_its_bound_changes_not_one_bit() -> None:
    weights = torch.tensor([[3.0, 4.0], [30.0, 40.0]])
    parameter = with_gradient(torch.tensor([[0.3, 0.4], [3.0, 4.0]]).double(), weights.double())
    before = grads_of([parameter])
    decision = clip([parameter], Adaptive(0.5 + 1e-12))
    assert decision == Decision(clipped=False, coefficient=1.0, threshold=0.5 + 1e-12)
    assert torch.equal(grads_of([parameter])[0], before[0])


def test_only_units_over_their_bound_change() -> None:
    weights = torch.tensor([[3.0, 4.0], [30.0, 40.0]])
    parameter = with_gradient(torch.tensor([[0.6, 0.8], [0.6, 0.8]]), weights)
    clip([parameter], Adaptive(0.1))
    first, second = grads_of([parameter])[0]
    assert first.tolist() == pytest.approx([0.3, 0.4])
    assert torch.equal(second, torch.tensor([0.6, 0.8]))


def test_weights_of_zero_count_as_eps_long() -> None:
    parameter = with_gradient(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2))
    clip([parameter], Adaptive(0.1, eps=0.5))
    assert grads_of([parameter])[0].tolist() == [pytest.approx([0.03, 0.04])]


def test_exempt_parameters_are_left_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model(torch.ones(5, 3) * 100).sum().backward()
    head = grads_of(list(model[1].parameters()))
    rule = Adaptive(1e-4, exempt=model[1].parameters())
    assert clip(list(model.parameters()), rule).clipped
    for old, new in zip(head, grads_of(list(model[1].parameters())), strict=True):
        assert torch.equal(old, new)
    alone = Adaptive(1e-4, exempt=model[1].weight)
    clip(list(model.parameters()), alone)
    assert torch.equal(head[0], grads_of(list(model[1].parameters()))[0])
    assert not torch.equal(head[1], grads_of(list(model[1].parameters()))[1])


def test_the_pending_factor_belongs_to_the_gradient() -> None:
    weights = torch.tensor([[3.0, 4.0]])
    parameter = with_gradient(torch.tensor([[600.0, 800.0]]), weights)
    decision = clip([parameter], Adaptive(0.1), factor=-1e-3)
    assert decision.coefficient == pytest.approx(0.5)
    assert grads_of([parameter])[0].tolist() == [pytest.approx([-0.3, -0.4])]
    assert not clip([parameter], Adaptive(0.2)).clipped


@pytest.mark.parametrize("scale", [1e-30, 1e-19, 1e19, 1e30])
def test_every_magnitude_is_clipped(scale: float) -> None:
    weights, grad = torch.ones(2, 300) * scale, torch.full((2, 300), 3.0) * scale
    parameter = with_gradient(grad, weights)
    clip([parameter], Adaptive(0.5, eps=1e-38))
    torch.testing.assert_close(grads_of([parameter])[0], weights * 0.5, rtol=1e-6, atol=0.0)


def test_float64_units_of_any_magnitude_are_clipped() -> None:
    weights = torch.tensor([[1e-200, 0.0], [3e200, 4e200]], dtype=torch.float64)
    parameter = with_gradient(weights * 4, weights)
    clip([parameter], Adaptive(0.5, eps=1e-250))
    torch.testing.assert_close(grads_of([parameter])[0], weights * 0.5, rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_gradients_are_multiplied_by_factors_that_are_not_rounded(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    weights, grad = (torch.randn(50, 40, generator=generator).to(dtype) for _ in range(2))
    parameter = with_gradient(grad.clone(), weights)
    clip([parameter], Adaptive(0.013))
    expected = by_definition(weights, grad, 0.013, 1e-3).to(dtype)
    assert torch.equal(grads_of([parameter])[0], expected)


def test_complex_and_transposed_gradients_are_clipped() -> None:
    weights = torch.tensor([[3 + 0j, 4j]])
    parameter = with_gradient(torch.tensor([[6j, 8 + 0j]]), weights)
    clip([parameter], Adaptive(1.0))
    torch.testing.assert_close(grads_of([parameter])[0], torch.tensor([[3j, 4 + 0j]]))
    turned = torch.tensor([[6.0, 0.1], [8.0, 0.1]]).t()
    parameter = with_gradient(turned, torch.tensor([[3.0, 4.0], [3.0, 4.0]]))
    clip([parameter], Adaptive(1.0))
    torch.testing.assert_close(turned, torch.tensor([[3.0, 4.0], [0.1, 0.1]]))


def test_sparse_rows_are_held_against_their_own_weights() -> None:
    weights = torch.tensor([[3.0, 4.0], [0.0, 0.0], [30.0, 40.0]])
    parameter = nn.Parameter(weights)
    parameter.grad = torch.sparse_coo_tensor(
        [[2, 0, 0]],
        torch.tensor([[6.0, 8.0], [3.0, 4.0], [3.0, 4.0]]),
        (3, 2),
        check_invariants=True,
    )
    assert clip([parameter], Adaptive(1.0)).clipped
    torch.testing.assert_close(
        parameter.grad.to_dense(), torch.tensor([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0]])
    )


def test_entries_sparse_in_several_dimensions_have_no_units_and_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    parameter.grad = torch.eye(3, 2).to_sparse()
    with pytest.raises(TypeError, match=r"shape \[3, 2\] is sparse in 2 dims"):
        clip([parameter], Adaptive())
    assert not clip([parameter], Adaptive(exempt=[parameter])).clipped


def test_empty_and_zero_gradients_are_no_trouble() -> None:
    parameters = with_gradients(
        torch.zeros(0, 3), torch.zeros(3, 0), torch.zeros(2, 2), torch.zeros(())
    )
    assert not clip(parameters, Adaptive()).clipped
    parameters = with_gradients(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    clip(parameters, Adaptive(0.1, eps=10.0))
    assert grads_of(parameters)[0].tolist() == [[0.0, 0.0], pytest.approx([0.6, 0.8])]


def test_a_generator_that_was_read_exempts_nothing_and_is_refused() -> None:
    read = nn.Linear(2, 2).parameters()
    list(read)
    with pytest.raises(ValueError, match=r"`Adaptive\(exempt=\.\.\.\)` got a `generator`"):
        Adaptive(exempt=read)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_bounds_that_are_not_above_zero_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"`Adaptive\(clipping=.*\)`: must be greater than 0"):
        Adaptive(bad)
    with pytest.raises(ValueError, match=r"`Adaptive\(eps=.*\)`: must be greater than 0"):
        Adaptive(eps=bad)


def test_it_shows_what_it_is_without_its_weights() -> None:
    assert (
        repr(Adaptive(exempt=[nn.Parameter(torch.ones(1))])) == "Adaptive(clipping=0.01, eps=0.001)"
    )
