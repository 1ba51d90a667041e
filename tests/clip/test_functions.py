"""The drop-in functions: what torch demands of its own, and where ours are meant to differ."""

import inspect
import itertools
import math
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from clipping import DEVICES, VECTORS, Passes, exact_norm, grads_of, numbers, with_gradients
from torch import Tensor, nn

import midstep as ms
from midstep.clip import clip_grad_norm_, clip_grad_value_, total_norm

NORM_TYPES = [0.5, 1.5, 2, 4, "inf"]
FOREACH = [None, False, True]


def definition(parameters: Iterator[nn.Parameter], norm_type: float | str) -> Tensor:
    """The norm in float32, entry by entry."""
    order = float(norm_type)
    grads = [p.grad for p in parameters if p.grad is not None]
    if math.isinf(order):
        return torch.stack([g.abs().max() for g in grads]).max()
    total = torch.stack([g.abs().pow(order).sum() for g in grads]).sum()
    return total.pow(1.0 / order)


# -- what torch's own tests of these functions demand ----------------------------------------------
# test/test_nn.py of PyTorch: test_clip_grad_norm, test_clip_grad_value,
# test_clip_grad_norm_error_if_nonfinite, test_clip_grad_norm_multi_device. Each demand is made here
# in other words, with the same numbers and tolerances. Those that are not met, on purpose:
#  - a generator that was already read: torch warns and clips nothing; here it is refused;
#  - finite entries of 2e200 whose powers overflow float64, orders 2 and 3.5: torch's norm is inf
#    and an error; here it is finite and right.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
class TestNormAsInTorch:
    def model(self, device: str, weight: Tensor, bias: Tensor) -> nn.Linear:
        model = nn.Linear(10, 10).to(device)
        model.weight.grad, model.bias.grad = weight.to(device), bias.to(device)
        return model

    def large(self, device: str) -> nn.Linear:
        return self.model(device, torch.arange(1.0, 101).view(10, 10), torch.ones(10).div(1000))

    def test_large_gradients_end_at_max_norm_by_one_factor(
        self, norm_type: float, foreach: bool | None, device: str
    ) -> None:
        model = self.large(device)
        before = grads_of(list(model.parameters()))
        norm_before = definition(model.parameters(), norm_type)
        norm = clip_grad_norm_(model.parameters(), 2, norm_type=norm_type, foreach=foreach)
        norm_after = definition(model.parameters(), norm_type)
        torch.testing.assert_close(norm, norm_before)  # also dtype and device
        assert norm_after.item() == pytest.approx(2.0, rel=1.3e-6)
        assert norm_after <= norm_before
        after = grads_of(list(model.parameters()))
        scale = torch.cat([(a / b).view(-1) for a, b in zip(after, before, strict=True)])
        assert scale.std().item() == pytest.approx(0.0, abs=1e-5)

    def test_the_measure_alone_gives_the_same_norm(
        self, norm_type: float, foreach: bool | None, device: str
    ) -> None:
        model = self.large(device)
        grads = grads_of(list(model.parameters()))
        norm = total_norm(grads, norm_type=norm_type, foreach=foreach)
        torch.testing.assert_close(norm, definition(model.parameters(), norm_type))
        assert torch.equal(
            norm, clip_grad_norm_(model.parameters(), 2, norm_type=norm_type, foreach=foreach)
        )

    def test_small_gradients_are_left(
        self, norm_type: float, foreach: bool | None, device: str
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        weight = torch.rand(10, 10, generator=generator).div(10_000)
        model = self.model(device, weight, torch.ones(10).div(500))
        before = grads_of(list(model.parameters()))
        norm_before = definition(model.parameters(), norm_type)
        norm = clip_grad_norm_(model.parameters(), 2, norm_type=norm_type, foreach=foreach)
        torch.testing.assert_close(norm, norm_before)
        assert norm <= 2
        for old, new in zip(before, grads_of(list(model.parameters())), strict=True):
            assert torch.equal(old, new)  # torch asks for a factor of about 1; this is every bit

    def test_one_tensor_will_do(self, norm_type: float, foreach: bool | None, device: str) -> None:
        grad = torch.arange(1.0, 101, device=device).view(10, 10)
        alone, listed = torch.randn(10, 10, device=device), torch.randn(10, 10, device=device)
        alone.grad, listed.grad = grad.clone(), grad.clone()
        clip_grad_norm_(alone, 2, norm_type=norm_type, foreach=foreach)
        clip_grad_norm_([listed], 2, norm_type=norm_type, foreach=foreach)
        torch.testing.assert_close(alone.grad, listed.grad, rtol=0, atol=0)

    def test_a_generator_that_was_read_is_no_silent_nothing(
        self, norm_type: float, foreach: bool | None, device: str
    ) -> None:
        model = self.large(device)
        parameters = model.parameters()
        list(parameters)
        # torch: one warning. Not met on purpose: an error.
        with pytest.raises(ValueError, match="`clip_grad_norm_` got a `generator` without"):
            clip_grad_norm_(parameters, 2, norm_type=norm_type, foreach=foreach)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("foreach", FOREACH)
class TestValueAsInTorch:
    @pytest.mark.parametrize("has_bias_gradient", [True, False])
    def test_every_entry_ends_within_the_bound(
        self, has_bias_gradient: bool, foreach: bool | None, device: str
    ) -> None:
        model = nn.Linear(10, 10).to(device)
        model.weight.grad = torch.arange(-50.0, 50, device=device).view(10, 10).div_(5)
        model.bias.grad = torch.full((10,), 2.0, device=device) if has_bias_gradient else None
        clip_grad_value_(model.parameters(), 2.5, foreach=foreach)
        for grad in grads_of(list(model.parameters())):
            assert grad.max() <= 2.5
            assert grad.min() >= -2.5

    def test_one_tensor_will_do(self, foreach: bool | None, device: str) -> None:
        grad = torch.arange(-50.0, 50, device=device).view(10, 10).div_(5)
        alone, listed = torch.randn(10, 10, device=device), torch.randn(10, 10, device=device)
        alone.grad, listed.grad = grad.clone(), grad.clone()
        clip_grad_value_(alone, 2.5, foreach=foreach)
        clip_grad_value_([listed], 2.5, foreach=foreach)
        assert torch.equal(alone.grad, listed.grad)


POSITIVE = [0.1, 1, 2, 3.5, math.inf]
NEGATIVE = [-0.1, -1, -2, -3.5]
INFINITE, NAN, LARGE, HUGE = (
    [math.inf, -math.inf],
    [math.nan],
    [2e22, -2e22],
    [2e200, -2e200],
)
# (is only one entry of ten set, does a finite gradient come before it, entries, orders whose norm
# is not finite, orders whose norm is)
NONFINITE_CASES = [
    (False, False, INFINITE, [*POSITIVE, *NEGATIVE], [0]),
    (False, True, INFINITE, POSITIVE, [*NEGATIVE, 0]),
    (True, False, INFINITE, POSITIVE, [*NEGATIVE, 0]),
    (True, True, INFINITE, POSITIVE, [*NEGATIVE, 0]),
    (False, False, NAN, [*POSITIVE, *NEGATIVE], [0]),
    (False, True, NAN, [*POSITIVE, *NEGATIVE], [0]),
    (True, False, NAN, [*POSITIVE, *NEGATIVE], [0]),
    (True, True, NAN, [*POSITIVE, *NEGATIVE], [0]),
    (False, False, LARGE, [], [*POSITIVE, *NEGATIVE, 0]),
    (False, True, LARGE, [], [*POSITIVE, *NEGATIVE, 0]),
    (True, False, LARGE, [], [*POSITIVE, *NEGATIVE, 0]),
    (True, True, LARGE, [], [*POSITIVE, *NEGATIVE, 0]),
    # torch lists 3.5 and 2 among the not finite ones in these four; see above.
    (False, False, HUGE, [-2, -3.5], [3.5, 2, math.inf, 1, 0.1, 0, -1, -0.1]),
    (False, True, HUGE, [], [3.5, 2, *NEGATIVE, math.inf, 1, 0.1, 0]),
    (True, False, HUGE, [], [3.5, 2, *NEGATIVE, math.inf, 1, 0.1, 0]),
    (True, True, HUGE, [], [3.5, 2, *NEGATIVE, math.inf, 1, 0.1, 0]),
]


class NormCase(NamedTuple):
    """A gradient of ten entries, an order, and whether the norm is finite."""

    is_one_entry_set: bool
    has_finite_gradient_before: bool
    entry: float
    order: float
    is_finite: bool

    def parameters(self, device: str) -> list[Tensor]:
        parameter = torch.ones(10, dtype=torch.float64, device=device, requires_grad=True)
        (parameter[1] if self.is_one_entry_set else parameter).mul(self.entry).sum().backward()
        if not self.has_finite_gradient_before:
            return [parameter]
        before = torch.ones(1, dtype=torch.float64, device=device, requires_grad=True)
        before.sum().backward()
        return [before, parameter]


def norm_cases() -> list[NormCase]:
    return [
        NormCase(is_one_entry_set, has_before, entry, order, is_finite)
        for is_one_entry_set, has_before, entries, nonfinite, finite in NONFINITE_CASES
        for orders, is_finite in ((nonfinite, False), (finite, True))
        for entry, order in itertools.product(entries, orders)
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("error_if_nonfinite", [True, False])
@pytest.mark.parametrize("case", norm_cases(), ids=str)
def test_a_norm_that_is_not_finite_is_an_error_where_asked_for_and_then_nothing_changes(
    case: NormCase, error_if_nonfinite: bool, device: str
) -> None:
    parameters = case.parameters(device)
    before = grads_of(parameters)
    if case.is_finite or not error_if_nonfinite:
        clip_grad_norm_(parameters, 1, case.order, error_if_nonfinite=error_if_nonfinite)
        return
    message = f"The total norm of order {float(case.order)} for gradients"
    with pytest.raises(RuntimeError, match=message):
        clip_grad_norm_(parameters, 1, case.order, error_if_nonfinite=True)
    for old, new in zip(before, grads_of(parameters), strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_layers_on_two_devices_are_clipped_like_layers_on_one(norm_type: float) -> None:
    # On a machine with one device this is the same claim without the crossing.
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
    first, second = devices[0], [*devices, "cpu"][1]
    spread, together = (nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 10)]) for _ in range(2))
    spread[0].to(first)
    spread[1].to(second)
    together.to(first)
    for model in (spread, together):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    norm = clip_grad_norm_(spread.parameters(), 0.5, norm_type=norm_type)
    expected = clip_grad_norm_(together.parameters(), 0.5, norm_type=norm_type)
    assert torch.equal(norm, expected)
    for a, b in zip(spread.parameters(), together.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad.to(first), b.grad)


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (clip_grad_norm_, torch.nn.utils.clip_grad_norm_),
        (clip_grad_value_, torch.nn.utils.clip_grad_value_),
        (total_norm, torch.nn.utils.get_total_norm),
    ],
)
def test_the_signatures_are_those_of_torch(ours: object, torchs: object) -> None:
    mine, theirs = inspect.signature(ours), inspect.signature(torchs)  # type: ignore[arg-type]
    assert list(mine.parameters) == list(theirs.parameters)
    # The one default that differs: what is not finite is an error unless told otherwise.
    for name in mine.parameters:
        if name != "error_if_nonfinite":
            assert mine.parameters[name].default == theirs.parameters[name].default


# -- where torch's are wrong -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [1e-24, 1e-30, 1e20, 1e30])
def test_a_norm_that_overflows_or_vanishes_in_torch_is_right(value: float) -> None:
    parameters = with_gradients(torch.full((1_000,), value), torch.full((3,), value))
    expected = exact_norm(grads_of(parameters))
    theirs = torch.nn.utils.get_total_norm(grads_of(parameters)).item()
    assert theirs in {0.0, math.inf}
    norm = clip_grad_norm_(parameters, expected / 2)
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    assert exact_norm(grads_of(parameters)) == pytest.approx(expected / 2, rel=1e-6)


def test_a_norm_of_bfloat16_gradients_keeps_its_digits() -> None:
    parameters = with_gradients(torch.full((1_001,), 0.3, dtype=torch.bfloat16))
    norm = clip_grad_norm_(parameters, math.inf)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact_norm(grads_of(parameters)), rel=1e-6)


@pytest.mark.parametrize(
    ("value", "num", "dtype"),
    [
        (1.0, 4, torch.float32),
        (1e30, 4, torch.float32),
        (3e38, 100, torch.float64),  # 3e39 is beyond float32
        (1e-45, 1, torch.float64),  # float32 holds it with one bit
        (0.0, 4, torch.float32),
    ],
)
def test_the_norm_comes_in_float64_where_float32_cannot_hold_it(
    value: float, num: int, dtype: torch.dtype
) -> None:
    grad = torch.full((num,), value)
    norm = total_norm([grad])
    assert norm.item() == pytest.approx(exact_norm([grad]), rel=1e-6, abs=0.0)
    if value != 1e-45:
        assert norm.dtype == dtype


def test_the_norm_of_float64_gradients_comes_in_float64() -> None:
    for dtype in (torch.float64, torch.complex128):
        assert total_norm([torch.ones(2, dtype=dtype)]).dtype == torch.float64
    assert total_norm([torch.ones(2, dtype=torch.complex64)]).dtype == torch.float32


def test_a_norm_on_the_threshold_changes_nothing() -> None:
    parameters = with_gradients(torch.tensor([3.0, 4.0]))
    clip_grad_norm_(parameters, 5.0)
    assert grads_of(parameters)[0].tolist() == [3.0, 4.0]


def test_a_parameter_listed_twice_counts_and_changes_once() -> None:
    (parameter,) = with_gradients(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm_([parameter, parameter], 2.5).item() == 5.0
    assert grads_of([parameter])[0].tolist() == [1.5, 2.0]
    clip_grad_value_([parameter, parameter], 1.75)
    assert grads_of([parameter])[0].tolist() == [1.5, 1.75]


def test_a_max_norm_of_zero_erases_as_in_torch() -> None:
    parameters = with_gradients(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm_(parameters, 0.0).item() == 5.0
    assert grads_of(parameters)[0].tolist() == [0.0, 0.0]


def test_nothing_to_clip_has_norm_zero() -> None:
    for parameters in ([], (), nn.ParameterList(), [nn.Parameter(torch.zeros(2))]):
        assert clip_grad_norm_(parameters, 1.0).item() == 0.0
        clip_grad_value_(parameters, 1.0)
    for order in (-1.0, 0.0, 1.0, 2.0, math.inf):
        assert total_norm([], order).item() == 0.0
        assert total_norm([torch.zeros(0)], order).item() == 0.0


def test_clipping_is_one_read_and_one_multiplication() -> None:
    parameters = with_gradients(torch.ones(1_000), torch.ones(300))
    with Passes([p.grad for p in parameters if p.grad is not None]) as passes:
        clip_grad_norm_(parameters, 100.0)
        assert passes.num == 1
        clip_grad_norm_(parameters, 1.0)
        assert passes.num == 3


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_a_sparse_gradient_is_measured_as_the_dense_one(order: float) -> None:
    parameter = nn.Parameter(torch.zeros(4, 2))
    parameter.grad = torch.sparse_coo_tensor(
        [[0, 2, 0]],
        torch.tensor([[3.0, 1.0], [2.0, 5.0], [1.0, 1.0]]),
        (4, 2),
        check_invariants=True,
    )
    dense = parameter.grad.to_dense()
    expected = pytest.approx(exact_norm([dense], order))
    assert total_norm([parameter.grad], order).item() == expected
    assert clip_grad_norm_([parameter], 1.0, order).item() == expected
    assert exact_norm([parameter.grad], order) == pytest.approx(1.0)


def test_the_measure_takes_one_tensor_and_any_that_require_gradients() -> None:
    assert total_norm(torch.tensor([3.0, 4.0])).item() == 5.0
    norm = total_norm(nn.Parameter(torch.tensor([3.0, 4.0])))
    assert (norm.item(), norm.requires_grad) == (5.0, False)
    assert total_norm(torch.ones(4) for _ in range(4)).item() == 4.0


def test_complex_gradients_are_clipped_in_any_order() -> None:
    for order in (-1.0, 0.0, 1.0, 2.0, math.inf):
        parameters = with_gradients(torch.tensor([3 + 4j, 0.5j]))
        norm = clip_grad_norm_(parameters, 0.25, order)
        theirs = torch.linalg.vector_norm(torch.tensor([3 + 4j, 0.5j]), order)
        if order > 0:
            assert norm.item() == pytest.approx(theirs.item(), rel=1e-6)
            assert exact_norm(grads_of(parameters), order) == pytest.approx(0.25, rel=1e-6)


def test_entries_are_clamped_as_in_torch_also_where_they_are_not_finite() -> None:
    case = VECTORS["value.nonfinite"]
    parameters = with_gradients(numbers(case["inputs"]["grads"]["w"]))
    clip_grad_value_(parameters, case["params"]["value"])
    expected = numbers(case["expected"]["grads"]["w"])
    torch.testing.assert_close(grads_of(parameters)[0], expected, rtol=0, atol=0, equal_nan=True)


# -- not finite, and refusals ----------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_an_error_with_its_place_and_changes_nothing(
    value: float,
) -> None:
    parameters = with_gradients(torch.ones(3), torch.tensor([1.0, value, value]))
    before = grads_of(parameters)
    with pytest.raises(ms.NonFiniteGradient, match=r"`parameters\[1\]` \(2\)") as raised:
        clip_grad_norm_(parameters, 1.0)
    assert isinstance(raised.value, RuntimeError)
    assert raised.value.parameters == {"parameters[1]": 2}
    assert raised.value.num_nonfinite == 2
    for old, new in zip(before, grads_of(parameters), strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ms.NonFiniteGradient) as raised:
        total_norm(before)
    assert raised.value.parameters == {"tensors[1]": 2}


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_told_to_let_it_pass_the_norm_tells_and_the_evidence_is_kept(value: float) -> None:
    # torch multiplies by 0 or nan here: 2 zeros and a nan, and nobody can say what there was.
    parameters = with_gradients(torch.tensor([3.0, 4.0]), torch.tensor([value]))
    norm = clip_grad_norm_(parameters, 1.0, error_if_nonfinite=False)
    assert not torch.isfinite(norm)
    finite, bad = grads_of(parameters)
    assert finite.tolist() == [3.0, 4.0]
    torch.testing.assert_close(bad, torch.tensor([value]), equal_nan=True)
    assert not torch.isfinite(total_norm([finite, bad], error_if_nonfinite=False))


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_a_bound_below_zero_is_refused(bad: float) -> None:
    parameters = with_gradients(torch.ones(1))
    with pytest.raises(ValueError, match=r"`clip_grad_norm_\(max_norm=.*\)`: must be at least 0"):
        clip_grad_norm_(parameters, bad)
    with pytest.raises(
        ValueError, match=r"`clip_grad_value_\(clip_value=.*\)`: must be at least 0"
    ):
        clip_grad_value_(parameters, bad)
    assert grads_of(parameters)[0].tolist() == [1.0]


def test_any_iterator_that_was_read_is_refused() -> None:
    read = iter([nn.Parameter(torch.zeros(1))])
    list(read)
    with pytest.raises(ValueError, match="`clip_grad_value_` got a `list_iterator` without"):
        clip_grad_value_(read, 1.0)


def test_nothing_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parameters = with_gradients(torch.ones(3), torch.ones(2, dtype=torch.complex64))
        for order in (-1.0, 0.0, 2.0, math.inf):
            clip_grad_norm_(parameters, 1.0, order)
        clip_grad_value_(parameters, 0.5)
