"""Clipping by each tensor's own average: spikes are cut where they are, and zero is no average."""

import math

import pytest
import torch
from clipping import VECTORS, exact_norm, grads_of, numbers, with_gradients
from norm_streams import clipped_norms, run
from torch import Tensor, nn

from midstep.clip import Attempt, ByTensorAverage, Decision
from midstep.gradients import Gradients


def update(rule: ByTensorAverage, *grads: Tensor | None) -> tuple[list[Tensor], Decision]:
    """One applied update of parameters, some of them without a gradient."""
    parameters = []
    for grad in grads:
        parameter = nn.Parameter(
            torch.zeros(1 if grad is None else grad.shape, dtype=torch.float64)
        )
        parameter.grad = grad if grad is None else grad.double()
        parameters.append(parameter)
    gradients = Gradients(parameters)
    decision = rule.decide(gradients, Attempt(step=0))
    gradients.apply_()
    rule.commit(decision)
    return grads_of(parameters), decision


def averages(rule: ByTensorAverage) -> dict[int, float]:
    found: dict[int, float] = rule.state_dict()["averages"]
    return found


def test_gradients_and_averages_are_those_of_the_authors_up_to_their_epsilon() -> None:
    case = VECTORS["adagc.authors"]
    params, expected = case["params"], case["expected"]
    rule = ByTensorAverage(
        factor=params["lambda_rel"],
        beta=params["beta"],
        warmup=params["start"],
        cap=params["lambda_abs"],
    )
    for index, grads in enumerate(case["inputs"]["grads"]):
        clipped, _ = update(rule, numbers(grads["w"]), numbers(grads["b"]))
        for ours, name in zip(clipped, ("w", "b"), strict=True):
            theirs = numbers(expected["grads"][index][name])
            torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=0.0)  # 1e-6 on 0.05
        gammas = [expected["gamma"][index][name] for name in ("w", "b")]
        assert list(averages(rule).values()) == pytest.approx(gammas, rel=3e-5)


def test_zero_gradients_in_the_warm_up_do_not_erase_a_tensor_for_ever() -> None:
    case = VECTORS["adagc.zero_trap"]
    assert case["expected"]["after_warmup"] == [0.0, 0.0, 0.0]  # the authors' rule
    params = case["params"]
    rule = ByTensorAverage(factor=params["lambda_rel"], beta=params["beta"], warmup=params["start"])
    assert clipped_norms(rule, case["inputs"]["grads"]) == [0.0, 0.0, 1.0, 1.0, 1.0]


def test_zero_gradients_after_the_warm_up_do_not_lower_an_average() -> None:
    rule = ByTensorAverage(warmup=1)
    run(rule, [0.5] * 10 + [0.0] * 10_000)
    assert averages(rule) == {0: pytest.approx(0.5)}
    assert clipped_norms(rule, [0.5]) == [0.5]


def test_the_first_gradient_of_a_tensor_after_the_warm_up_is_its_first_average() -> None:
    rule = ByTensorAverage(warmup=2)
    for _ in range(5):
        update(rule, torch.tensor([0.1]), None)
    clipped, _ = update(rule, torch.tensor([0.1]), torch.tensor([0.7]))
    assert [g.item() for g in clipped] == pytest.approx([0.1, 0.7])
    assert averages(rule)[1] == pytest.approx(0.7)
    clipped, _ = update(rule, torch.tensor([0.1]), torch.tensor([0.9]))
    assert clipped[1].item() == pytest.approx(1.05 * 0.7)


def test_averages_belong_to_positions_and_not_to_the_order_of_gradients() -> None:
    rule = ByTensorAverage(warmup=1)
    update(rule, torch.tensor([0.1]), torch.tensor([0.6]))
    clipped, _ = update(rule, None, torch.tensor([0.6]))
    assert clipped[0].item() == pytest.approx(0.6)
    assert averages(rule) == {0: pytest.approx(0.1), 1: pytest.approx(0.6)}


def test_a_spike_is_cut_in_its_own_tensor_and_leaves_the_others_alone() -> None:
    rule = ByTensorAverage(warmup=3)
    for _ in range(5):
        update(rule, torch.tensor([0.3, 0.4]), torch.tensor([0.2]))
    clipped, decision = update(rule, torch.tensor([0.3, 0.4]), torch.tensor([20.0]))
    assert torch.equal(clipped[0], torch.tensor([0.3, 0.4]).double())
    assert clipped[1].item() == pytest.approx(1.05 * 0.2)
    assert decision.coefficient == pytest.approx(math.hypot(0.5, 0.21) / math.hypot(0.5, 20.0))


def test_the_warm_up_takes_the_smallest_norm_as_the_cap_left_it() -> None:
    rule = ByTensorAverage(warmup=3, cap=1.0)
    run(rule, [5.0, 0.7, 0.9])
    assert averages(rule) == {0: pytest.approx(0.7)}


def test_an_average_grows_no_faster_than_it_says() -> None:
    rule = ByTensorAverage(warmup=1, cap=math.inf)
    run(rule, [1.0])
    run(rule, [100.0] * 694)
    assert averages(rule)[0] == pytest.approx(2.0, rel=1e-3)
    assert averages(rule)[0] == pytest.approx((1 + 0.05 * 0.02) ** 694, rel=1e-9)


def test_a_tensor_below_the_floor_may_rise_to_it_at_once() -> None:
    rule = ByTensorAverage(factor=2.0, warmup=1, floor=0.1)
    run(rule, [1e-9])
    assert clipped_norms(rule, [0.15, 5.0]) == pytest.approx([0.15, 0.2])


@pytest.mark.parametrize("num_before", [0, 200])
def test_the_cap_holds_on_the_whole_at_every_step(num_before: int) -> None:
    rule = ByTensorAverage(warmup=100, cap=1.0)
    for _ in range(num_before):
        update(rule, torch.tensor([3.0]), torch.tensor([4.0]))
    clipped, decision = update(rule, torch.tensor([3.0]), torch.tensor([4.0]))
    assert exact_norm(clipped) == pytest.approx(1.0, rel=1e-9)
    assert decision.coefficient == pytest.approx(0.2, rel=1e-9)
    assert clipped[0].item() == pytest.approx(0.6, rel=1e-9)


def test_a_tiny_tensor_that_is_cut_shows_although_the_whole_norm_does_not() -> None:
    rule = ByTensorAverage(warmup=1, floor=1e-12, cap=math.inf)
    update(rule, torch.tensor([1.0]), torch.tensor([1e-11]))
    _, decision = update(rule, torch.tensor([1.0]), torch.tensor([1e-9]))
    assert decision.clipped


def test_a_checkpoint_that_went_through_json_fits() -> None:
    rule = ByTensorAverage()
    rule.load_state_dict({"num_updates": 3, "averages": {"0": 0.5, "10": 0.25}})
    assert averages(rule) == {0: 0.5, 10: 0.25}


def test_half_gradients_are_measured_in_full() -> None:
    rule = ByTensorAverage(warmup=1, cap=math.inf)
    for _ in range(2):
        parameters = with_gradients(torch.full((1_001,), 0.3, dtype=torch.bfloat16))
        expected = exact_norm(grads_of(parameters))
        rule.commit(rule.decide(Gradients(parameters), Attempt(step=0)))
    assert averages(rule) == {0: pytest.approx(expected, rel=1e-6)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"factor": 1.0}, "`ByTensorAverage(factor=1.0)`: must be greater than 1"),
        ({"beta": 1.0}, "`ByTensorAverage(beta=1.0)`: must be greater than 0 and less than 1"),
        ({"warmup": 0}, "`ByTensorAverage(warmup=0)`: must be at least 1"),
        ({"floor": 0.0}, "`ByTensorAverage(floor=0.0)`: must be greater than 0"),
        ({"cap": 0.0}, "`ByTensorAverage(cap=0.0)`: must be greater than 0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the whole message is compared
        ByTensorAverage(**arguments)  # type: ignore[arg-type]
    assert message in str(raised.value)
