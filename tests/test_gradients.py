"""Gradients: the norm is right at any size, magnitude, dtype and layout, and one factor waits."""

import math
import sys
import warnings

import pytest
import torch
from clipping import DEVICES, Passes, exact_norm, grads_of, with_gradient, with_gradients
from torch import Tensor, nn

from midstep.gradients import (
    Gradients,
    Norms,
    combined_norm,
    multiply_,
    num_nonfinite,
    tensor_norms,
)

SIZES = [1, 2, 255, 256, 257, 4_096, 16_384, 16_385, 16_640, 16_895, 65_536, 100_000, 1_048_831]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
ORDERS = [0.5, 1.0, 2.0, 3.0, 3.5, math.inf]


def norm_of(*grads: Tensor, p: float = 2.0) -> float:
    return Gradients(with_gradients(*grads)).norm(p)


def is_right(grads: list[Tensor], p: float = 2.0) -> bool:
    return norm_of(*grads, p=p) == pytest.approx(exact_norm(grads, p), rel=1e-6, abs=0.0)


def spread(num: int, low: float, high: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Entries of every magnitude between two, of both signs."""
    generator = torch.Generator().manual_seed(num)
    exponents = torch.empty(num, dtype=torch.float64).uniform_(
        math.log10(low), math.log10(high), generator=generator
    )
    signs = torch.randint(2, (num,), generator=generator) * 2 - 1
    return (signs * 10**exponents).to(dtype)


# -- the norm: magnitudes and sizes --------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1.0, 0.7, 1e-30, 3e-19, 1e-15, 1e18, 1.3e19, 1e30])
def test_equal_entries_whose_rounding_errors_add_up_have_the_right_norm(
    size: int, value: float
) -> None:
    entry = torch.tensor(value).item()  # as float32 holds it
    expected = entry * math.sqrt(size)
    assert norm_of(torch.full((size,), value)) == pytest.approx(expected, rel=1e-6, abs=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("value", [0.1, 1e-4, 300.0])
def test_equal_entries_of_other_dtypes_have_the_right_norm(
    dtype: torch.dtype, size: int, value: float
) -> None:
    grad = torch.full((size,), value, dtype=dtype)
    expected = grad[0].item() * math.sqrt(size)
    assert norm_of(grad) == pytest.approx(expected, rel=1e-6, abs=0.0)


@pytest.mark.parametrize("size", SIZES)
def test_two_values_in_turn_have_the_right_norm(size: int) -> None:
    # One value in each lane of the kernel: the rounding errors of a lane all point the same way.
    grad = torch.tensor([0.1, 0.05]).repeat(size)
    assert is_right([grad])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 255, 257, 4_096, 16_385, 70_001])
def test_random_entries_have_the_right_norm(dtype: torch.dtype, size: int) -> None:
    grad = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert is_right([grad])


@pytest.mark.parametrize("size", [2, 255, 257, 4_096, 70_001])
def test_all_magnitudes_in_one_tensor_have_the_right_norm(size: int) -> None:
    assert is_right([spread(size, 1e-30, 1e30)])


def test_all_magnitudes_in_different_tensors_have_the_right_norm() -> None:
    grads = [torch.full((300,), 10.0**e) for e in range(-30, 31, 3)]
    assert is_right(grads)
    for grad in grads:
        assert is_right([grad])


@pytest.mark.parametrize("num_large", [0, 1])
def test_many_tiny_entries_beside_large_ones_count(num_large: int) -> None:
    # Each square is 1e-38 or less and vanishes in float32; together they are the norm.
    grad = torch.full((100_000,), 3e-20)
    grad[:num_large] = 3e-18
    assert is_right([grad])


@pytest.mark.parametrize("value", [1e-40, 1e-45, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("size", [1, 300, 20_000])
def test_the_ends_of_float32_have_the_right_norm(value: float, size: int) -> None:
    assert is_right([torch.full((size,), value)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_ends_of_the_half_dtypes_have_the_right_norm(dtype: torch.dtype) -> None:
    for value in (
        torch.finfo(dtype).max,
        torch.finfo(dtype).tiny,
        torch.finfo(dtype).smallest_normal,
    ):
        assert is_right([torch.full((1_000,), value, dtype=dtype)])
        assert is_right([torch.full((20_000,), value, dtype=dtype)])


@pytest.mark.parametrize("value", [1e-300, 1e-160, 1e-154, 1e-150, 1e150, 1e154, 1e160, 1e300])
@pytest.mark.parametrize("size", [1, 3, 1_000, 20_000])
def test_float64_entries_whose_squares_leave_its_range_have_the_right_norm(
    value: float, size: int
) -> None:
    assert is_right([torch.full((size,), value, dtype=torch.float64)])
    assert is_right([spread(size, 1e-300, 1e300, torch.float64)])


def test_a_norm_that_no_float64_can_hold_is_the_largest_one_and_not_inf() -> None:
    largest = sys.float_info.max
    grad = torch.full((4,), largest, dtype=torch.float64)
    for p in (0.5, 1.0, 2.0, 3.0):
        assert norm_of(grad, p=p) == largest
        assert norm_of(*[grad[:1].clone() for _ in range(4)], p=p) == largest
    assert norm_of(torch.ones(10_000), p=0.01) == largest


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
def test_zero_gradients_have_norm_zero(dtype: torch.dtype) -> None:
    for p in ORDERS:
        assert norm_of(torch.zeros(300, dtype=dtype), p=p) == 0.0


def test_nothing_has_norm_zero() -> None:
    for p in ORDERS:
        assert Gradients([]).norm(p) == 0.0
        assert Gradients([nn.Parameter(torch.zeros(3))]).norm(p) == 0.0
        assert norm_of(torch.zeros(0), torch.zeros(3, 0, 5), p=p) == 0.0
        assert norm_of(torch.zeros(0), torch.tensor([3.0]), p=p) == pytest.approx(3.0)


def test_a_gradient_without_dimensions_counts() -> None:
    assert norm_of(torch.tensor(3.0), torch.tensor(-4.0)) == 5.0
    assert norm_of(torch.tensor(1e30), torch.tensor(0.0)) == pytest.approx(1e30)


def test_a_hundred_million_entries_have_the_right_norm() -> None:
    # torch's own float32 norm is off by 7e-4 here. 400 MB: every entry by closed form, no copy.
    grad = torch.full((100_000_000,), 0.1)
    entry = grad[0].item()
    assert tensor_norms([grad]) == [pytest.approx(entry * 1e4, rel=1e-6)]
    grad[::1_000_000] = 1e3
    expected = math.sqrt(100 * 1e6 + (100_000_000 - 100) * entry**2)
    assert tensor_norms([grad]) == [pytest.approx(expected, rel=1e-6)]


# -- the norm: orders, layouts, kinds ------------------------------------------------------------


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
def test_every_order_is_right(p: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    grads = [torch.randn(n, generator=generator, dtype=wide).to(dtype) for n in (3, 300, 20_000)]
    assert is_right(grads, p)


@pytest.mark.parametrize("p", ORDERS)
def test_every_order_is_right_at_every_magnitude(p: float) -> None:
    assert is_right([spread(20_000, 1e-30, 1e30), spread(7, 1e-30, 1e-20)], p)


def layouts() -> dict[str, Tensor]:
    base = torch.randn(240, 360, generator=torch.Generator().manual_seed(2))
    image = torch.randn(3, 80, 50, 7, generator=torch.Generator().manual_seed(3))
    return {
        "short": base[:50, :50].t(),
        "transposed": base.t(),
        "permuted": image.permute(2, 0, 3, 1),
        "channels last": image.to(memory_format=torch.channels_last),
        "columns": base[:, ::3],
        "rows": base[::5],
        "a step": base.view(-1)[::2],
        "reversed halves": base.unflatten(0, (2, 120)).transpose(0, 1),
        "one in another": base.unsqueeze(1).transpose(0, 1),
    }


@pytest.mark.parametrize("layout", list(layouts()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_every_layout_has_the_right_norm(layout: str, dtype: torch.dtype, p: float) -> None:
    grad = layouts()[layout]
    strided = torch.empty_strided(grad.shape, grad.stride(), dtype=dtype).copy_(grad)
    assert strided.stride() == grad.stride()
    assert is_right([strided], p)


@pytest.mark.parametrize("shape", [(16, 16), (16, 8, 2), (300, 300), (700, 70)])
def test_equal_entries_of_a_slice_have_the_right_norm(shape: tuple[int, ...]) -> None:
    # Without a whole row in one piece, a kernel adds one by one.
    for value in (0.1, 1 / 3):
        grad = torch.full(shape, value)[:, ::2]
        assert is_right([grad])
        assert is_right([torch.full(shape, complex(value, value), dtype=torch.complex64)[:, ::2]])


def test_an_expanded_tensor_counts_every_entry() -> None:
    value = torch.tensor([0.1])
    for size in (5_000, 50_000):
        assert tensor_norms([value.expand(size)]) == [
            pytest.approx(value.item() * math.sqrt(size), rel=1e-6)
        ]


@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.parametrize("size", [1, 100, 8_192, 8_193, 20_000])
def test_complex_gradients_have_the_norm_of_their_moduli(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(4)
    grad = torch.randn(size, generator=generator, dtype=dtype)
    for scale in (1.0, 1e-30, 1e30):
        assert is_right([grad * scale])


@pytest.mark.parametrize("p", ORDERS)
def test_a_modulus_beyond_float32_is_no_inf(p: float) -> None:
    part = torch.tensor(3e38)
    assert is_right([torch.complex(part, part).view(1)], p)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_a_subnormal_modulus_is_neither_inf_nor_nan(p: float) -> None:
    tiny = torch.full((4,), complex(3.0, 4.0) * 2.0**-1070, dtype=torch.complex128)
    (norm,) = tensor_norms([tiny], p)
    assert norm == pytest.approx(5.0 * 4.0 ** (1.0 / p) * 2.0**-1070, rel=0.01)


@pytest.mark.parametrize("p", ORDERS)
def test_a_gradient_that_is_conjugated_lazily_counts_and_can_be_scaled(p: float) -> None:
    lazy = torch.tensor([3 + 4j, 1 - 2j]).conj()
    assert lazy.is_conj()
    assert tensor_norms([lazy], p) == [pytest.approx(exact_norm([lazy], p))]
    (parameter,) = with_gradients(lazy)
    gradients = Gradients([parameter], factor=2.0)
    assert gradients.norm(p) == pytest.approx(2 * exact_norm([lazy], p))
    gradients.apply_()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [6 - 8j, 2 + 4j]


@pytest.mark.parametrize("is_coalesced", [True, False])
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_a_sparse_gradient_has_the_norm_of_the_dense_one(is_coalesced: bool, p: float) -> None:
    indices = torch.tensor([[0, 2, 0]])  # row 0 twice: its entries are sums
    values = torch.tensor([[3.0, 1.0], [2.0, 5.0], [1.0, 1.0]])
    sparse = torch.sparse_coo_tensor(indices, values, (4, 2), check_invariants=True)
    grad = sparse.coalesce() if is_coalesced else sparse
    parameter = nn.Parameter(torch.zeros(4, 2))
    parameter.grad = grad
    gradients = Gradients([parameter])
    assert gradients.norm(p) == pytest.approx(exact_norm([torch.tensor([4.0, 2.0, 2.0, 5.0])], p))
    gradients.mul_(0.5)
    gradients.apply_()
    assert parameter.grad.is_sparse
    assert parameter.grad.to_dense().tolist() == [[2.0, 1.0], [0.0, 0.0], [1.0, 2.5], [0.0, 0.0]]


def test_a_sparse_gradient_without_entries_has_norm_zero() -> None:
    parameter = nn.Parameter(torch.zeros(4, 2))
    indices = torch.zeros(1, 0, dtype=torch.long)
    parameter.grad = torch.sparse_coo_tensor(
        indices, torch.zeros(0, 2), (4, 2), check_invariants=True
    )
    assert Gradients([parameter], factor=2.0).norm() == 0.0


def test_a_layout_whose_entries_cannot_be_changed_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this layout a beta
        parameter = nn.Parameter(torch.eye(3).to_sparse_csr())
        parameter.grad = torch.eye(3).to_sparse_csr()
    with pytest.raises(TypeError, match=r"shape \[3, 3\] is torch.sparse_csr"):
        Gradients([parameter])


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_dtypes_may_be_mixed(p: float) -> None:
    dtypes = (*FLOATS, *COMPLEX)
    grads = [torch.full((n,), 0.3).to(dtype) for dtype in dtypes for n in (300, 20_000)]
    assert is_right(grads, p)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_devices_may_be_mixed(p: float) -> None:
    grads = [torch.full((n,), 0.3, device=d) for d in DEVICES for n in (3, 20_000)]
    parameters = with_gradients(*grads)
    gradients = Gradients(parameters, factor=0.5)
    assert gradients.norm(p) == pytest.approx(0.5 * exact_norm(grads, p), rel=1e-6)
    gradients.apply_()
    assert all((p.grad == torch.tensor(0.3).mul(0.5).item()).all() for p in parameters)


# -- which gradients count -----------------------------------------------------------------------


def test_parameters_without_a_gradient_do_not_count() -> None:
    without = nn.Parameter(torch.full((3,), 100.0))
    (parameter,) = with_gradients(torch.tensor([3.0, 4.0]))
    gradients = Gradients([without, parameter])
    assert gradients.norm() == 5.0
    assert (gradients.parameters, gradients.positions, len(gradients)) == ([parameter], [1], 1)
    gradients.mul_(0.5)
    gradients.apply_()
    assert without.grad is None


def test_a_parameter_listed_twice_counts_and_changes_once() -> None:
    a, b = with_gradients(torch.tensor([3.0]), torch.tensor([4.0]))
    gradients = Gradients([a, b, a, a, b], factor=0.5)
    assert gradients.norm() == 2.5
    assert gradients.positions == [0, 1]
    gradients.apply_()
    assert a.grad is not None
    assert a.grad.tolist() == [1.5]


def test_tied_weights_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    model.head(model.embedding(torch.arange(5))).square().sum().backward()
    weight = model.embedding.weight
    assert weight.grad is not None
    listed = [model.embedding.weight, model.head.weight]
    assert Gradients(listed).norm() == pytest.approx(exact_norm([weight.grad]), rel=1e-6)


def test_positions_count_parameters_without_a_gradient() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(4)]
    for index in (1, 3):
        parameters[index].grad = torch.ones(1)
    assert Gradients([*parameters, parameters[1]]).positions == [1, 3]


# -- not finite ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
@pytest.mark.parametrize(
    ("size", "place"), [(1, 0), (300, 299), (16_385, 0), (20_000, 16_384), (20_000, 19_999)]
)
def test_one_non_finite_entry_shows_in_every_norm(
    value: float, dtype: torch.dtype, size: int, place: int
) -> None:
    grad = torch.ones(size, dtype=dtype)
    grad[place] = value
    gradients = Gradients(with_gradients(torch.ones(2), grad))
    assert not any(math.isfinite(gradients.norm(p)) for p in ORDERS)
    assert gradients.num_nonfinite() == [0, 1]


def test_inf_and_nan_together_are_not_finite() -> None:
    gradients = Gradients(with_gradients(torch.tensor([math.inf]), torch.tensor([math.nan])))
    assert not any(math.isfinite(gradients.norm(p)) for p in ORDERS)


def test_finite_entries_of_any_magnitude_are_finite() -> None:
    grads = [torch.full((20_000,), v) for v in (1e-45, 1e-20, 1e20, 3.4e38)]
    gradients = Gradients(with_gradients(*grads))
    assert all(math.isfinite(gradients.norm(p)) for p in ORDERS)
    assert gradients.num_nonfinite() == [0, 0, 0, 0]


def test_non_finite_entries_are_counted_by_tensor() -> None:
    many = torch.zeros(2**20 + 7, 2)
    many[[0, 5, -1], [0, 1, 1]] = torch.tensor([math.inf, math.nan, -math.inf])
    assert num_nonfinite(
        [many, many.t(), torch.zeros(0), torch.ones(3), torch.tensor(math.nan)]
    ) == [
        3,
        3,
        0,
        0,
        1,
    ]


# -- the factor ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
@pytest.mark.parametrize("p", ORDERS)
def test_measuring_changes_no_bit(dtype: torch.dtype, p: float) -> None:
    for scale in (1.0, 1e-300, 1e300):
        grad = (torch.randn(20_000, dtype=torch.float64) * scale).to(dtype)
        if not torch.isfinite(grad).all():
            continue
        (parameter,) = with_gradients(grad.clone())
        gradients = Gradients([parameter], factor=3.0)
        gradients.norm(p)
        gradients.num_nonfinite()
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, grad)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("factor", [0.123456, 0.3333, 0.0017, 3.1e-5, 1 / 3])
@pytest.mark.parametrize("how", ["one", "each"])
def test_the_factor_is_not_rounded_to_the_dtype_of_the_gradient(
    dtype: torch.dtype, factor: float, how: str
) -> None:
    # Rounded to bfloat16 the factor is off by up to 0.4 %, and every entry with it.
    grad = torch.rand(1_000, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(
        dtype
    )
    a, b = with_gradients(grad.clone(), grad.clone())
    gradients = Gradients([a, b])
    if how == "one":
        gradients.mul_(factor)
    else:
        gradients.mul_each_([factor, 1.5])
    gradients.apply_()
    assert a.grad is not None
    ulp = 0.0 if dtype is not torch.float32 else 2e-7  # float32 rounds the factor itself once
    torch.testing.assert_close(a.grad, (grad.double() * factor).to(dtype), rtol=ulp, atol=0.0)


@pytest.mark.parametrize(
    ("value", "factor"),
    [(1e30, 1e-39), (1e30, 1e-48), (1e38, 1e-70), (1e-30, 1e45), (1e-40, 1e60), (-3.0, 1e-38)],
)
@pytest.mark.parametrize("how", ["one", "each"])
def test_a_factor_that_float32_cannot_hold_is_applied_all_the_same(
    value: float, factor: float, how: str
) -> None:
    a, b = with_gradients(torch.full((3,), value), torch.full((3,), value))
    gradients = Gradients([a, b], factor=factor)
    if how == "each":
        gradients.mul_each_([1.0, 1.0])
    expected = torch.tensor(value).item() * factor
    assert gradients.norm() == pytest.approx(abs(expected) * math.sqrt(6), rel=1e-6, abs=0.0)
    gradients.apply_()
    assert a.grad is not None
    assert a.grad.tolist() == [pytest.approx(expected, rel=1e-6, abs=0.0)] * 3


def test_a_factor_of_zero_erases() -> None:
    a, b = with_gradients(torch.ones(3), torch.ones(3))
    multiply_([torch.ones(2)], [0.0])
    gradients = Gradients([a, b], factor=0.0)
    assert gradients.norm() == 0.0
    gradients.apply_()
    assert a.grad is not None
    assert a.grad.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("factor", [math.inf, -math.inf, math.nan])
def test_a_factor_that_is_not_finite_ends_and_shows(factor: float) -> None:
    (parameter,) = with_gradients(torch.ones(3))
    gradients = Gradients([parameter], factor=factor)
    assert not math.isfinite(gradients.norm())
    gradients.apply_()
    assert parameter.grad is not None
    assert not torch.isfinite(parameter.grad).any()


def test_all_that_multiplies_is_one_pass_and_the_norm_is_another() -> None:
    for size in (100, 20_000, 25_600):
        parameters = with_gradients(torch.full((size,), 0.3), torch.full((size,), 0.4))
        gradients = Gradients(parameters, factor=0.5)
        with Passes(gradients.tensors) as passes:
            gradients.norm()
            assert passes.num == 1
            gradients.mul_(0.7)
            gradients.mul_(3.0)
            gradients.norms()
            gradients.norm()
            assert passes.num == 1
            gradients.apply_()
            assert passes.num == 2
            gradients.apply_()
            assert passes.num == 2
        assert parameters[0].grad is not None
        assert parameters[0].grad[0].item() == pytest.approx(0.3 * 0.5 * 0.7 * 3.0)


@pytest.mark.parametrize("size", [3, 5_000, 8_193, 30_976, 70_001])
def test_the_norm_of_all_is_the_same_number_whether_or_not_each_was_asked_for(size: int) -> None:
    grads = [spread(size + i, 1e-6, 1e3) for i in range(7)]
    alone, beside = (Gradients(with_gradients(*grads)) for _ in range(2))
    each = beside.norms()
    assert alone.norm() == beside.norm()
    assert each == pytest.approx([exact_norm([g], 2.0) for g in grads], rel=1e-6, abs=0.0)


def test_the_norms_of_each_are_those_of_the_moment_all_were_measured() -> None:
    parameters = with_gradients(torch.full((3,), 2.0), torch.full((20_000,), 0.5))
    gradients = Gradients(parameters)
    gradients.norm()
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.zero_()
    assert gradients.norms() == pytest.approx([math.sqrt(12.0), math.sqrt(5_000.0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_of_a_lone_gradient_is_of_the_moment_it_was_read(dtype: torch.dtype) -> None:
    tensor = torch.tensor([3.0, 4.0], dtype=dtype)
    norms = Norms([tensor])
    tensor.mul_(10.0)
    assert (norms.total(), norms.each()) == (5.0, [5.0])


def test_a_factor_of_one_costs_no_pass() -> None:
    parameters = with_gradients(torch.ones(1_000), torch.ones(1_000))
    gradients = Gradients(parameters)
    with Passes(gradients.tensors) as passes:
        gradients.mul_(4.0)
        gradients.mul_(0.25)
        gradients.apply_()
    assert passes.num == 0


def test_only_the_tensors_with_a_factor_of_their_own_are_passed_over() -> None:
    parameters = with_gradients(torch.ones(300), torch.ones(100))
    gradients = Gradients(parameters)
    with Passes(gradients.tensors) as passes:
        gradients.mul_each_([1.0, 0.5])
        gradients.mul_each_([1.0, 0.5])
        gradients.apply_()
    assert passes.num == 0.25
    assert [p.grad.unique().tolist() for p in parameters if p.grad is not None] == [[1.0], [0.25]]


def test_norms_of_no_order_but_two_and_infinity_cost_two_passes() -> None:
    gradients = Gradients(with_gradients(torch.ones(1_000)))
    with Passes(gradients.tensors) as passes:
        gradients.norm(math.inf)
        assert passes.num == 1
        gradients.norm(3.0)
        assert passes.num == 3


def test_the_factors_of_each_and_of_all_multiply() -> None:
    gradients = Gradients(with_gradients(torch.tensor([3.0]), torch.tensor([4.0])), factor=-2.0)
    assert (gradients.factor, gradients.factors) == (-2.0, [-2.0, -2.0])
    gradients.mul_each_([0.5, 1.0])
    gradients.mul_(3.0)
    assert (gradients.factor, gradients.factors) == (None, [-3.0, -6.0])
    assert gradients.norms() == [9.0, 24.0]
    assert gradients.norm() == pytest.approx(math.hypot(9.0, 24.0))


def test_what_was_handed_over_is_not_applied_again() -> None:
    (parameter,) = with_gradients(torch.tensor([3.0, 4.0]))
    gradients = Gradients([parameter], factor=0.5)
    assert gradients.norm() == 2.5
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)  # as a fused optimizer does
    gradients.hand_over_()
    assert (gradients.factor, gradients.norm()) == (1.0, 2.5)
    gradients.apply_()
    assert parameter.grad.tolist() == [1.5, 2.0]


def test_a_norm_read_after_applying_is_that_of_the_rounded_gradient() -> None:
    (parameter,) = with_gradients(torch.full((1_000,), 1.0, dtype=torch.bfloat16))
    gradients = Gradients([parameter], factor=0.3333)
    assert gradients.norm() == pytest.approx(0.3333 * math.sqrt(1_000))
    gradients.apply_()
    assert parameter.grad is not None
    assert gradients.norm() == pytest.approx(exact_norm([parameter.grad]), rel=1e-6)


def test_an_edit_sees_the_true_gradient_and_is_measured() -> None:
    (parameter,) = with_gradients(torch.tensor([6.0, 8.0]))
    gradients = Gradients([parameter], factor=0.5)
    assert (gradients.norm(), gradients.norm(math.inf)) == (5.0, 4.0)
    seen = []
    gradients.edit_(lambda tensors: seen.append([t.tolist() for t in tensors]))
    gradients.edit_(lambda tensors: [t.add_(1.0) for t in tensors])
    assert seen == [[[3.0, 4.0]]]
    assert (gradients.norm(), gradients.norm(math.inf)) == (pytest.approx(math.hypot(4, 5)), 5.0)


def test_the_list_of_norms_belongs_to_the_caller() -> None:
    gradients = Gradients(with_gradients(torch.tensor([3.0, 4.0])))
    gradients.norms().append(100.0)
    assert gradients.norm() == 5.0


# -- where the numbers lie -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "grad",
    [
        torch.tensor([2.0]).expand(4),
        torch.tensor([[2.0], [2.0]]).expand(2, 3),
        torch.full((6,), 2.0).as_strided((3, 4), (1, 1)),
    ],
    ids=["expanded", "expanded columns", "overlapping windows"],
)
@pytest.mark.parametrize("how", ["one", "each", "edit"])
def test_a_gradient_whose_entries_share_memory_is_multiplied_once(grad: Tensor, how: str) -> None:
    (parameter,) = with_gradients(grad)
    gradients = Gradients([parameter], factor=0.5 if how == "one" else 1.0)
    if how == "each":
        gradients.mul_each_([0.5])
    if how == "edit":
        gradients.edit_(lambda tensors: [t.mul_(0.5) for t in tensors])
    assert gradients.norm() == pytest.approx(math.sqrt(grad.numel()))
    gradients.apply_()
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.ones(grad.shape))
    assert grad.unique().tolist() == [2.0], "the memory it came from is somebody else's"


def test_a_gradient_in_the_memory_of_another_is_multiplied_once() -> None:
    buffer = torch.arange(1.0, 7.0)
    a, b, c, d = with_gradients(buffer[:4], buffer[:4], buffer[2:], torch.tensor([9.0]))
    gradients = Gradients([a, b, c, d], factor=2.0)
    gradients.apply_()
    assert [g.tolist() for g in grads_of([a, b, c, d])] == [
        [2.0, 4.0, 6.0, 8.0],
        [2.0, 4.0, 6.0, 8.0],
        [6.0, 8.0, 10.0, 12.0],
        [18.0],
    ]


def test_gradients_side_by_side_in_one_buffer_stay_there() -> None:
    # As in the buckets of DistributedDataParallel: a copy would part them from their reduction.
    buffer = torch.arange(1.0, 7.0)
    a, b, empty = with_gradients(buffer[:2], buffer[2:].view(2, 2).t(), buffer[2:2])
    Gradients([b, empty, a], factor=2.0).apply_()
    assert buffer.tolist() == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]


def test_a_gradient_of_inference_mode_can_be_scaled() -> None:
    with torch.inference_mode():
        grad = torch.tensor([3.0, 4.0])
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = grad
    gradients = Gradients([parameter], factor=0.5)
    assert gradients.norm() == 2.5
    gradients.apply_()
    assert parameter.grad.tolist() == [1.5, 2.0]


def test_a_gradient_that_has_a_graph_of_its_own_can_be_measured_and_scaled() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a reference cycle, which the end of this test breaks
        (weight.square().sum() / 2).backward(create_graph=True)
    assert weight.grad is not None
    assert weight.grad.requires_grad
    for p in ORDERS:
        Gradients([weight]).norm(p)
    gradients = Gradients([weight], factor=0.5)
    assert gradients.norm() == 2.5
    gradients.edit_(lambda tensors: [t.clamp_(max=1.5) for t in tensors])
    assert weight.grad.tolist() == [1.5, 1.5]
    weight.grad = None


def test_a_non_contiguous_gradient_is_scaled_where_it_lies() -> None:
    base = torch.ones(4, 6)
    (parameter,) = with_gradients(base.t()[::2])
    Gradients([parameter], factor=2.0).apply_()
    assert base.t()[::2].unique().tolist() == [2.0]
    assert base.t()[1::2].unique().tolist() == [1.0]


# -- the parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("p", ORDERS)
def test_norms_of_parts_combine_to_the_norm_of_the_whole(p: float) -> None:
    parts = [spread(n, 1e-3, 1e3, torch.float64) for n in (1, 5, 300)]
    assert combined_norm(tensor_norms(parts, p), p) == pytest.approx(exact_norm(parts, p), rel=1e-9)


def test_combined_norms_neither_overflow_nor_vanish() -> None:
    assert combined_norm([3e300, 4e300], 2.0) == pytest.approx(5e300)
    assert combined_norm([3e-300, 4e-300], 2.0) == pytest.approx(5e-300, abs=0.0)
    assert combined_norm([1e200, 1e200], 3.0) == pytest.approx(2 ** (1 / 3) * 1e200)
    assert combined_norm([], 2.0) == combined_norm([], 1.0) == combined_norm([0.0], 3.0) == 0.0


def test_the_parameters_may_come_from_a_generator() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    assert len(Gradients(model.parameters())) == 2


def test_a_gradient_of_another_parameter_is_untouched() -> None:
    mine, other = with_gradient(torch.ones(2)), with_gradient(torch.ones(2))
    Gradients([mine], factor=0.5).apply_()
    assert other.grad is not None
    assert other.grad.tolist() == [1.0, 1.0]
