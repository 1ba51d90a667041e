"""Laws of norms and clipping, for gradients of any number, shape, dtype and magnitude."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from clipping import exact_norm, grads_of, with_gradients
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from midstep.clip import (
    Adaptive,
    Attempt,
    ByGlobalNorm,
    ByGroupNorm,
    ByRms,
    ByTensorNorm,
    ByValue,
    Chain,
    Rule,
    clip_grad_norm_,
    clip_grad_value_,
    total_norm,
)
from midstep.gradients import Gradients, combined_norm, tensor_norms

ORDERS = st.sampled_from([0.5, 1.0, 2.0, 3.0, math.inf])


@st.composite
def entries(draw: st.DrawFn, low: float = 1e-30, high: float = 1e30) -> Tensor:
    """A float32 tensor whose entries are zero or of any magnitude between two."""
    shape = draw(
        st.sampled_from(
            [(), (0,), (1,), (3,), (2, 2), (255,), (16, 16), (257,), (5, 103), (140, 120)]
        )
    )
    kind = draw(st.sampled_from(["equal", "normal", "any magnitude", "one stands out"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    exponent = draw(st.floats(math.log10(low), math.log10(high)))
    size = math.prod(shape)
    if kind == "equal":
        values = torch.ones(size, dtype=torch.float64)
    elif kind == "normal":
        values = torch.randn(size, generator=generator, dtype=torch.float64).clamp(-8, 8) / 8
    elif kind == "any magnitude":
        draws = torch.rand(size, generator=generator, dtype=torch.float64)
        values = 10 ** (draws * (math.log10(low) - exponent))
    else:
        values = torch.full((size,), 1e-6, dtype=torch.float64)
        values[: min(1, size)] = -1.0
    return (values * 10**exponent).float().view(shape)


def gradients_lists(low: float = 1e-30, high: float = 1e30) -> st.SearchStrategy[list[Tensor]]:
    return st.lists(entries(low, high), min_size=1, max_size=5)


Make = Callable[[Sequence[nn.Parameter]], Rule]


@st.composite
def simple_rules(draw: st.DrawFn) -> Make:
    """Any rule without a memory, still to be made for its parameters."""
    threshold, p = draw(st.floats(1e-6, 1e6)), draw(ORDERS)
    makes: list[Make] = [
        lambda _: ByGlobalNorm(threshold, p=p),
        lambda _: ByTensorNorm(threshold, p=p),
        lambda ps: ByGroupNorm([(ps[:1], threshold)], p=p),
        lambda _: ByRms(threshold),
        lambda _: ByValue(threshold),
        lambda _: Adaptive(threshold, eps=1.0),
    ]
    return draw(st.sampled_from(makes))


def chains() -> st.SearchStrategy[Make]:
    """One rule, or one after the other."""

    def chained(makes: list[Make]) -> Make:
        return lambda ps: Chain(*[make(ps) for make in makes])

    return st.lists(simple_rules(), min_size=1, max_size=3).map(chained)


def apply(rule: Rule, parameters: list[nn.Parameter], factor: float = 1.0) -> bool:
    gradients = Gradients(parameters, factor=factor)
    decision = rule.decide(gradients, Attempt(step=0))
    gradients.apply_()
    return decision.clipped


@given(gradients_lists(), ORDERS)
def test_the_norm_is_that_of_the_definition(grads: list[Tensor], p: float) -> None:
    expected = exact_norm(grads, p)
    assume(expected < 1e300)
    assert Gradients(with_gradients(*grads)).norm(p) == pytest.approx(expected, rel=1e-6, abs=0.0)


@given(entries(), st.data(), ORDERS)
def test_however_a_gradient_is_cut_into_tensors_the_norm_is_the_same(
    grad: Tensor, data: st.DataObject, p: float
) -> None:
    flat = grad.reshape(-1)
    cuts = sorted(data.draw(st.lists(st.integers(0, flat.numel()), max_size=4)))
    parts = [t.clone() for t in torch.tensor_split(flat, cuts)]
    whole = combined_norm(tensor_norms([flat], p), p)
    assert combined_norm(tensor_norms(parts, p), p) == pytest.approx(whole, rel=1e-6, abs=0.0)


@given(gradients_lists(), st.floats(1e-30, 1e30), ORDERS)
def test_the_norm_of_a_multiple_is_the_multiple_of_the_norm(
    grads: list[Tensor], factor: float, p: float
) -> None:
    gradients = Gradients(with_gradients(*grads))
    before = gradients.norm(p)
    assume(before < 1e300)
    gradients.mul_(factor)
    assert gradients.norm(p) == pytest.approx(before * factor, rel=1e-12)


@given(gradients_lists(1e-6, 1e6), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5))
def test_factors_that_were_given_one_by_one_are_applied_as_their_product(
    grads: list[Tensor], factors: list[float]
) -> None:
    parameters = with_gradients(*grads)
    gradients = Gradients(parameters)
    for factor in factors:
        gradients.mul_(factor)
    expected = gradients.norm()
    gradients.apply_()
    assert exact_norm(grads_of(parameters)) == pytest.approx(expected, rel=1e-6)
    assert gradients.factor == 1.0


@given(gradients_lists(1e-25), st.floats(0.01, 100.0), ORDERS)
def test_a_clipped_norm_is_the_smaller_of_norm_and_threshold(
    grads: list[Tensor], share: float, p: float
) -> None:
    norm = exact_norm(grads, p)
    assume(0.0 < norm < 1e300)
    parameters = with_gradients(*[g.clone() for g in grads])
    is_clipped = apply(ByGlobalNorm(share * norm, p=p), parameters)
    after = exact_norm(grads_of(parameters), p)
    assert after == pytest.approx(min(norm, share * norm), rel=2e-6)
    if not is_clipped:
        assert all(torch.equal(a, b) for a, b in zip(grads, grads_of(parameters), strict=True))
    if abs(share - 1) > 1e-6:
        assert is_clipped is (share < 1)


@given(gradients_lists(1e-20), st.floats(1e-3, 1.0))
def test_clipping_by_the_global_norm_multiplies_every_entry_by_one_number(
    grads: list[Tensor], share: float
) -> None:
    norm = exact_norm(grads)
    assume(norm > 0.0)
    parameters = with_gradients(*[g.clone() for g in grads])
    gradients = Gradients(parameters)
    coefficient = ByGlobalNorm(share * norm).decide(gradients, Attempt(step=0)).coefficient
    gradients.apply_()
    assert coefficient is not None
    for old, new in zip(grads, grads_of(parameters), strict=True):
        torch.testing.assert_close(new.double(), old.double() * coefficient, rtol=2e-7, atol=1e-44)


@given(gradients_lists(1e-6, 1e6), simple_rules())
def test_clipping_twice_is_clipping_once(grads: list[Tensor], make: Make) -> None:
    parameters = with_gradients(*grads)
    rule = make(parameters)
    apply(rule, parameters)
    once = grads_of(parameters)
    apply(rule, parameters)
    for first, second in zip(once, grads_of(parameters), strict=True):
        torch.testing.assert_close(second, first, rtol=5e-7, atol=1e-44)


@given(gradients_lists(1e-6, 1e6), chains())
def test_no_rule_makes_an_entry_larger_or_turns_its_sign(grads: list[Tensor], make: Make) -> None:
    parameters = with_gradients(*[g.clone() for g in grads])
    apply(make(parameters), parameters)
    for old, new in zip(grads, grads_of(parameters), strict=True):
        assert (new.abs() <= old.abs()).all()
        assert (torch.sign(new) * torch.sign(old) >= 0).all()


@given(gradients_lists(1e-6, 1e6), simple_rules(), st.integers(-20, 20))
def test_the_scale_that_gradients_carry_makes_no_difference(
    grads: list[Tensor], make: Make, power: int
) -> None:
    plain, scaled = with_gradients(*[g.clone() for g in grads]), with_gradients(*grads)
    for parameter in scaled:
        assert parameter.grad is not None
        parameter.grad *= 2.0**power
    assert apply(make(plain), plain) is apply(make(scaled), scaled, factor=2.0**-power)
    for first, second in zip(grads_of(plain), grads_of(scaled), strict=True):
        torch.testing.assert_close(second, first, rtol=3e-7, atol=1e-44)


@given(gradients_lists(1e-6, 1e6), st.floats(1e-3, 1e3), ORDERS)
def test_the_drop_in_and_the_rule_do_the_same(
    grads: list[Tensor], threshold: float, p: float
) -> None:
    ours, dropped = with_gradients(*[g.clone() for g in grads]), with_gradients(*grads)
    norm = total_norm(grads_of(dropped), p)
    apply(ByGlobalNorm(threshold, p=p), ours)
    assert torch.equal(clip_grad_norm_(dropped, threshold, p), norm)
    assert all(torch.equal(a, b) for a, b in zip(grads_of(ours), grads_of(dropped), strict=True))


@settings(max_examples=50)
@given(gradients_lists(1e-6, 1e6), st.floats(1e-3, 1e3))
def test_where_torch_is_right_the_drop_in_agrees_with_it(
    grads: list[Tensor], threshold: float
) -> None:
    ours, theirs = with_gradients(*[g.clone() for g in grads]), with_gradients(*grads)
    norm = clip_grad_norm_(ours, threshold)
    torch.testing.assert_close(
        norm, torch.nn.utils.clip_grad_norm_(theirs, threshold), rtol=2e-4, atol=0.0
    )
    epsilon = 1e-6 / max(norm.item(), 1e-6)
    for first, second in zip(grads_of(ours), grads_of(theirs), strict=True):
        torch.testing.assert_close(first, second, rtol=2e-4 + epsilon, atol=0.0)
    clip_grad_value_(ours, threshold / 10)
    torch.nn.utils.clip_grad_value_(theirs, threshold / 10)
    for first, second in zip(grads_of(ours), grads_of(theirs), strict=True):
        torch.testing.assert_close(first, second, rtol=2e-4 + epsilon, atol=0.0)
