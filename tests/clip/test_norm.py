"""Clipping by norm: strictly above the threshold, by one factor, and no epsilon."""

import math

import pytest
import torch
from clipping import VECTORS, Passes, exact_norm, grads_of, numbers, with_gradients
from torch import nn

from midstep.clip import Attempt, ByGlobalNorm, ByGroupNorm, ByTensorNorm, Decision, Rule
from midstep.gradients import Gradients

RULES = [ByGlobalNorm, ByTensorNorm]


def clip(parameters: list[nn.Parameter], rule: Rule, *, step: int = 0) -> Decision:
    gradients = Gradients(parameters)
    decision = rule.decide(gradients, Attempt(step=step))
    gradients.apply_()
    return decision


def clipped_case(name: str, rule: Rule) -> dict[str, torch.Tensor]:
    grads = {key: numbers(values) for key, values in VECTORS[name]["inputs"]["grads"].items()}
    parameters = with_gradients(*grads.values())
    clip(parameters, rule)
    return dict(zip(grads, grads_of(parameters), strict=True))


# -- published numbers -----------------------------------------------------------------------------


def test_the_global_norm_is_clipped_as_optax_does() -> None:
    case = VECTORS["global.l2.optax"]
    for name, grad in clipped_case("global.l2.optax", ByGlobalNorm(5.0)).items():
        torch.testing.assert_close(
            grad, numbers(case["expected"]["grads"][name]), rtol=1e-14, atol=0.0
        )


@pytest.mark.parametrize("name", ["global.l2.torch", "global.l1.torch", "global.l3.torch"])
def test_other_orders_are_clipped_as_torch_does_up_to_its_epsilon(name: str) -> None:
    case = VECTORS[name]
    p = case["params"]["norm_type"]
    rule = ByGlobalNorm(5.0, p=p)
    parameters = with_gradients(*[numbers(v) for v in case["inputs"]["grads"].values()])
    gradients = Gradients(parameters)
    assert gradients.norm(p) == pytest.approx(case["expected"]["norm"], rel=1e-12)
    decision = rule.decide(gradients, Attempt(step=0))
    gradients.apply_()
    # torch divides by the norm plus 1e-6, on purpose not done here.
    norm, epsilon = case["expected"]["norm"], case["params"]["eps"]
    assert decision.coefficient == pytest.approx(
        case["expected"]["coef"] * (norm + epsilon) / norm, rel=1e-12
    )
    for key, grad in zip(case["inputs"]["grads"], grads_of(parameters), strict=True):
        torch.testing.assert_close(
            grad,
            numbers(case["expected"]["grads"][key]) * (norm + epsilon) / norm,
            rtol=1e-12,
            atol=0.0,
        )
    assert exact_norm(grads_of(parameters), p) == pytest.approx(5.0, rel=1e-12)


def test_a_norm_on_the_threshold_is_left_where_torch_shrinks_it() -> None:
    case = VECTORS["global.l2.boundary"]
    assert case["expected"]["coef"] < 1.0
    (grad,) = clipped_case("global.l2.boundary", ByGlobalNorm(5.0)).values()
    assert grad.tolist() == [3.0, 4.0]


def test_a_norm_below_the_threshold_is_left() -> None:
    (grad,) = clipped_case("global.l2.below", ByGlobalNorm(50.0)).values()
    assert grad.tolist() == VECTORS["global.l2.below"]["expected"]["grads"]["w"]


def test_groups_are_clipped_as_torch_does_once_for_each() -> None:
    case = VECTORS["group"]
    grads = {key: numbers(values) for key, values in case["inputs"]["grads"].items()}
    parameters = dict(zip(grads, with_gradients(*grads.values()), strict=True))
    rule = ByGroupNorm(
        [([parameters[n] for n in g["names"]], g["max_norm"]) for g in case["params"]["groups"]]
    )
    clip(list(parameters.values()), rule)
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        expected = numbers(case["expected"]["grads"][name])
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-6, atol=0.0)  # its epsilon


def test_tensors_are_clipped_as_torch_does_one_at_a_time() -> None:
    case = VECTORS["per_tensor"]
    for name, grad in clipped_case("per_tensor", ByTensorNorm(0.5)).items():
        expected = numbers(case["expected"]["grads"][name])
        torch.testing.assert_close(grad, expected, rtol=2e-6, atol=0.0)  # its epsilon
        assert exact_norm([grad]) == pytest.approx(0.5, rel=1e-14)


# -- when and what ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_norm_on_the_threshold_changes_not_one_bit(rule: type, dtype: torch.dtype) -> None:
    parameters = with_gradients(torch.tensor([3.0, 4.0], dtype=dtype))
    decision = clip(parameters, rule(5.0))
    assert decision == Decision(clipped=False, coefficient=1.0, threshold=5.0)
    assert grads_of(parameters)[0].tolist() == [3.0, 4.0]


@pytest.mark.parametrize("rule", RULES)
def test_the_next_number_above_the_threshold_clips_and_the_next_below_does_not(rule: type) -> None:
    grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    for max_norm, is_clipped in ((math.nextafter(5.0, 0), True), (math.nextafter(5.0, 9), False)):
        parameters = with_gradients(grad.clone())
        decision = clip(parameters, rule(max_norm))
        assert decision.clipped is is_clipped
        assert (decision.coefficient != 1.0) is is_clipped


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("magnitude", [1e-42, 1e-30, 1e-20, 1.0, 1e20, 1e30, 5e37])
def test_the_threshold_holds_at_every_magnitude(rule: type, magnitude: float) -> None:
    grad = torch.randn(1_000, generator=torch.Generator().manual_seed(0)) * magnitude
    # Gradients so small lose their digits in float32 as soon as they are made smaller.
    rel = 1e-6 if magnitude > 1e-36 else 1e-1
    norm = exact_norm([grad])
    parameters = with_gradients(grad.clone())
    decision = clip(parameters, rule(norm / 3))
    assert decision.coefficient == pytest.approx(1 / 3, rel=1e-6)
    assert exact_norm(grads_of(parameters)) == pytest.approx(norm / 3, rel=rel)


def test_a_huge_gradient_is_brought_down_to_one() -> None:
    parameters = with_gradients(torch.full((1_000,), 1e38), torch.full((3,), -3e38))
    before = grads_of(parameters)
    clip(parameters, ByGlobalNorm(1.0))
    assert exact_norm(grads_of(parameters)) == pytest.approx(1.0, rel=1e-6)
    for old, new in zip(before, grads_of(parameters), strict=True):
        torch.testing.assert_close(
            new.double() * exact_norm(before), old.double(), rtol=1e-6, atol=0
        )


def test_one_factor_keeps_the_direction() -> None:
    parameters = with_gradients(torch.randn(50), torch.randn(70))
    before = torch.cat(grads_of(parameters)).double()
    clip(parameters, ByGlobalNorm(0.01))
    after = torch.cat(grads_of(parameters)).double()
    cosine = (before @ after) / before.norm() / after.norm()
    assert cosine.item() == pytest.approx(1.0, abs=1e-12)


def test_only_tensors_above_the_threshold_are_turned_down_by_tensor() -> None:
    parameters = with_gradients(torch.tensor([3.0, 4.0]), torch.tensor([0.3, 0.4]))
    decision = clip(parameters, ByTensorNorm(1.0))
    assert decision.coefficient == pytest.approx(math.hypot(1.0, 0.5) / math.hypot(5.0, 0.5))
    large, small = grads_of(parameters)
    assert large.tolist() == pytest.approx([0.6, 0.8])
    assert torch.equal(small, torch.tensor([0.3, 0.4]))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_the_coefficient_is_the_norm_after_over_the_norm_before_in_the_same_order(p: float) -> None:
    parameters = with_gradients(torch.tensor([3.0, 4.0]), torch.tensor([0.3, 0.4]), torch.ones(3))
    before = exact_norm(grads_of(parameters), p)
    for rule in (
        ByTensorNorm(1.0, p=p),
        ByGroupNorm([(parameters[:1], 0.5), (parameters[1:], 0.8)], p=p),
        ByGlobalNorm(0.3, p=p),
    ):
        before = exact_norm(grads_of(parameters), p)
        decision = clip(parameters, rule)
        assert decision.coefficient == pytest.approx(
            exact_norm(grads_of(parameters), p) / before, rel=1e-6
        )


def test_zero_gradients_are_left_alone() -> None:
    parameters = with_gradients(torch.zeros(3), torch.zeros(300))
    groups = ByGroupNorm([(parameters, 1.0)])
    for rule in (ByGlobalNorm(1e-30), ByTensorNorm(1e-30), groups):
        decision = clip(parameters, rule)
        assert (decision.clipped, decision.coefficient) == (False, 1.0)
    assert not torch.cat(grads_of(parameters)).any()


def test_no_gradients_at_all_are_no_trouble() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    for rule in (ByGlobalNorm(1.0), ByTensorNorm(1.0), ByGroupNorm([(parameter, 1.0)])):
        assert not clip([parameter], rule).clipped


def test_an_infinite_threshold_only_measures() -> None:
    parameters = with_gradients(torch.full((3,), 1e38))
    for rule in (ByGlobalNorm(math.inf), ByTensorNorm(math.inf)):
        assert not clip(parameters, rule).clipped


@pytest.mark.parametrize("rule", RULES)
def test_clipping_what_was_clipped_changes_nothing_to_speak_of(rule: type) -> None:
    parameters = with_gradients(torch.randn(300) * 5, torch.randn(7) * 5)
    clip(parameters, rule(1.0))
    once = grads_of(parameters)
    clip(parameters, rule(1.0))
    for first, second in zip(once, grads_of(parameters), strict=True):
        torch.testing.assert_close(second, first, rtol=3e-7, atol=0.0)


def test_the_pending_factor_belongs_to_the_norm_and_is_applied_once() -> None:
    # 1024 times the true gradient (3, 4), as a loss scale leaves it.
    parameters = with_gradients(torch.tensor([3072.0, 4096.0]))
    gradients = Gradients(parameters, factor=1 / 1024)
    with Passes(gradients.tensors) as passes:
        decision = ByGlobalNorm(1.0).decide(gradients, Attempt(step=0))
        assert decision.coefficient == 0.2
        assert gradients.factor == pytest.approx(0.2 / 1024)
        gradients.apply_()
        assert passes.num == 2  # one to measure, one to multiply
    assert grads_of(parameters)[0].tolist() == pytest.approx([0.6, 0.8])


def test_measuring_what_needs_no_clipping_is_one_pass_in_all() -> None:
    gradients = Gradients(with_gradients(torch.ones(1_000)))
    with Passes(gradients.tensors) as passes:
        ByGlobalNorm(100.0).decide(gradients, Attempt(step=0))
        ByTensorNorm(100.0).decide(gradients, Attempt(step=0))
        ByGroupNorm([(gradients.parameters, 100.0)]).decide(gradients, Attempt(step=0))
        gradients.apply_()
    assert passes.num == 1


# -- groups ----------------------------------------------------------------------------------------


def test_each_group_has_its_own_norm_and_threshold() -> None:
    a, b, c, free = with_gradients(*(torch.tensor([x]) for x in (3.0, 4.0, 6.0, 100.0)))
    clip([a, b, c, free], ByGroupNorm([([a, b], 1.0), ([c], lambda step: 2.0 + step)]), step=1)
    assert [g.item() for g in grads_of([a, b, c, free])] == pytest.approx([0.6, 0.8, 3.0, 100.0])


def test_a_parameter_alone_may_be_a_group() -> None:
    (a,) = with_gradients(torch.tensor([3.0, 4.0]))
    clip([a], ByGroupNorm([(a, 1.0)]))
    assert grads_of([a])[0].tolist() == pytest.approx([0.6, 0.8])


def test_a_parameter_listed_twice_in_its_group_counts_once() -> None:
    (a,) = with_gradients(torch.tensor([3.0, 4.0]))
    assert not clip([a], ByGroupNorm([([a, a], 5.0)])).clipped


def test_groups_may_come_from_generators() -> None:
    model = nn.Linear(2, 2)
    rule = ByGroupNorm((module.parameters(), 1.0) for module in [model])
    model(torch.ones(1, 2)).sum().backward()
    assert clip(list(model.parameters()), rule).clipped


# -- schedules and refusals ------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_a_threshold_may_follow_the_number_of_applied_updates(rule: type) -> None:
    scheduled = rule(lambda step: 4.0 if step < 10 else 6.0)
    for step, threshold in ((0, 4.0), (9, 4.0), (10, 6.0)):
        parameters = with_gradients(torch.tensor([3.0, 4.0]))
        decision = clip(parameters, scheduled, step=step)
        assert (decision.threshold, decision.clipped) == (threshold, threshold < 5.0)


@pytest.mark.parametrize("bad", [0, 0.0, -1.0, math.nan, -math.inf])
def test_a_threshold_that_is_not_above_zero_is_refused(bad: float) -> None:
    for name, make in (
        ("ByGlobalNorm", ByGlobalNorm),
        ("ByTensorNorm", ByTensorNorm),
        ("ByGroupNorm", lambda max_norm: ByGroupNorm([([nn.Parameter(torch.ones(1))], max_norm)])),
    ):
        with pytest.raises(
            ValueError, match=rf"`{name}\(max_norm={bad!r}\)`: must be greater than 0"
        ):
            make(bad)


@pytest.mark.parametrize("bad", [None, "1.0", True, torch.tensor(1.0), [1.0]])
def test_a_threshold_that_is_no_number_is_refused(bad: object) -> None:
    with pytest.raises(TypeError, match=r"`ByGlobalNorm\(max_norm=.*\)`: must be a number"):
        ByGlobalNorm(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("found", [0.0, -1.0, math.nan])
def test_a_schedule_that_leaves_the_range_is_refused_when_it_does(found: float) -> None:
    parameters = with_gradients(torch.ones(1))
    with pytest.raises(ValueError, match="must be greater than 0"):
        clip(parameters, ByGlobalNorm(lambda _: found))
    assert grads_of(parameters)[0].tolist() == [1.0]


@pytest.mark.parametrize("bad", [0.0, -2.0, math.nan])
def test_an_order_that_makes_no_norm_is_refused(bad: float) -> None:
    groups = [([nn.Parameter(torch.ones(1))], 1.0)]
    for make in (ByGlobalNorm, ByTensorNorm):
        with pytest.raises(ValueError, match=r"`By\w+Norm\(p=.*\)`: the order of a norm"):
            make(1.0, p=bad)
    with pytest.raises(ValueError, match=r"`ByGroupNorm\(p=.*\)`: the order of a norm"):
        ByGroupNorm(groups, p=bad)


def test_a_generator_that_was_read_is_no_group() -> None:
    model = nn.Linear(2, 2)
    read = model.parameters()
    list(read)
    with pytest.raises(ValueError, match=r"group 1 lists no parameter\. A generator"):
        ByGroupNorm([(model.parameters(), 1.0), (read, 1.0)])


def test_no_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="`ByGroupNorm` got no group"):
        ByGroupNorm([])


def test_a_parameter_in_two_groups_is_refused() -> None:
    a, b = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"shape \[2, 3\] is in groups 0 and 1"):
        ByGroupNorm([([a, b], 1.0), ([a], 2.0)])


def test_rules_show_what_they_are() -> None:
    assert repr(ByGlobalNorm(1.0)) == "ByGlobalNorm(max_norm=1.0, p=2.0)"
    assert "2.5" in repr(ByGroupNorm([([nn.Parameter(torch.ones(1))], 2.5)]))
