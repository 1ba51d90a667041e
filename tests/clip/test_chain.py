"""Chains: each rule sees what the one before left, and remembers its own part."""

import pytest
import torch
from clipping import Passes, exact_norm, grads_of, with_gradients
from torch import nn

from midstep.clip import (
    Attempt,
    ByGlobalNorm,
    ByGroupNorm,
    ByQuantile,
    ByTensorNorm,
    ByValue,
    Chain,
    Decision,
    SkipSpike,
)
from midstep.errors import CheckpointError
from midstep.gradients import Gradients


def clip(parameters: list[nn.Parameter], chain: Chain, *, factor: float = 1.0) -> Decision:
    gradients = Gradients(parameters, factor=factor)
    decision = chain.decide(gradients, Attempt(step=0))
    gradients.apply_()
    return decision


def test_the_order_of_the_rules_is_the_order_of_the_cuts() -> None:
    (value_first,) = with_gradients(torch.tensor([3.0, 4.0]))
    clip([value_first], Chain(ByValue(1.0), ByGlobalNorm(1.0)))
    (norm_first,) = with_gradients(torch.tensor([3.0, 4.0]))
    clip([norm_first], Chain(ByGlobalNorm(1.0), ByValue(0.7)))
    assert grads_of([value_first])[0].tolist() == pytest.approx([0.5**0.5, 0.5**0.5])
    assert grads_of([norm_first])[0].tolist() == pytest.approx([0.6, 0.7])


def test_each_rule_sees_what_the_one_before_left() -> None:
    parameters = with_gradients(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1.0]))
    decision = clip(parameters, Chain(ByTensorNorm(1.0), ByGlobalNorm(1.0)))
    first, second = decision.seen
    assert first.coefficient == pytest.approx(2**0.5 / 26**0.5)
    assert second.coefficient == pytest.approx(1 / 2**0.5)
    assert decision.coefficient == pytest.approx(1 / 26**0.5)
    assert exact_norm(grads_of(parameters)) == pytest.approx(1.0, rel=1e-6)


def test_rules_that_multiply_cost_one_read_and_one_multiplication_together() -> None:
    parameters = with_gradients(torch.ones(500), torch.ones(300))
    chain = Chain(
        ByGroupNorm([(parameters[:1], 3.0), (parameters[1:], 2.0)]),
        ByTensorNorm(1.5),
        ByGlobalNorm(1.0),
    )
    with Passes([p.grad for p in parameters if p.grad is not None]) as passes:
        clip(parameters, chain, factor=0.5)
    assert passes.num == 2
    assert exact_norm(grads_of(parameters)) == pytest.approx(1.0, rel=1e-6)


def test_an_edit_in_the_middle_is_measured_anew() -> None:
    parameters = with_gradients(torch.tensor([30.0, 40.0, 0.5]))
    decision = clip(parameters, Chain(ByGlobalNorm(100.0), ByValue(1.0), ByGlobalNorm(1.0)))
    assert (decision.clipped, decision.coefficient, decision.threshold) == (True, None, 100.0)
    assert grads_of(parameters)[0].tolist() == pytest.approx([2 / 3, 2 / 3, 1 / 3])


def test_a_chain_that_clips_nothing_says_so() -> None:
    parameters = with_gradients(torch.tensor([3.0, 4.0]))
    decision = clip(parameters, Chain(ByValue(10.0), ByGlobalNorm(5.0)))
    assert (decision.clipped, decision.coefficient, decision.skip) == (False, 1.0, False)
    assert grads_of(parameters)[0].tolist() == [3.0, 4.0]


def test_the_first_rule_that_wants_to_skip_ends_the_chain() -> None:
    parameters = with_gradients(torch.ones(1))
    chain = Chain(SkipSpike(window=4), ByValue(0.5))
    for _ in range(3):
        parameters[0].grad = torch.ones(1)
        chain.commit(clip(parameters, chain))
    parameters[0].grad = torch.full((1,), 100.0)
    decision = clip(parameters, chain)
    assert decision.skip
    assert not decision.clipped
    assert grads_of(parameters)[0].tolist() == [100.0]


def test_the_order_of_the_norm_is_that_of_the_first_rule() -> None:
    assert Chain(ByGlobalNorm(1.0, p=3.0), ByValue(1.0)).p == 3.0
    assert Chain(ByValue(1.0), ByGlobalNorm(1.0, p=3.0)).p == 2.0


def test_each_rule_remembers_its_own_part() -> None:
    (parameter,) = with_gradients(torch.tensor([8.0]))
    whole, half = (ByQuantile(warmup=1, cap=cap) for cap in (100.0, 4.0))
    chain = Chain(whole, ByGlobalNorm(6.0), half)
    chain.commit(clip([parameter], chain))
    assert (whole.state_dict(), half.state_dict()) == ({"norms": [8.0]}, {"norms": [6.0]})


def test_a_chain_goes_on_where_it_was_saved_and_so_does_one_inside_another() -> None:
    def make() -> Chain:
        return Chain(ByValue(1e9), Chain(ByQuantile(warmup=1, cap=1e9), ByGlobalNorm(7.0)))

    (parameter,) = with_gradients(torch.tensor([5.0]))
    first, second = make(), make()
    first.commit(clip([parameter], first))
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert first.state_dict()["1"]["0"] == {"norms": [5.0]}
    parameter.grad = torch.tensor([20.0])
    assert clip([parameter], second).coefficient == 0.25


def test_the_state_of_another_chain_is_refused() -> None:
    saved = Chain(ByValue(1.0), ByQuantile()).state_dict()
    with pytest.raises(CheckpointError, match="has 1 rules and the saved chain had 2"):
        Chain(ByQuantile()).load_state_dict(saved)


def test_a_chain_without_a_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="`Chain\\(\\)` without a rule"):
        Chain()


def test_a_chain_shows_its_rules() -> None:
    assert repr(Chain(ByValue(1.0))) == "Chain(ByValue(max_value=1.0))"
