"""The bound: above what rounding does, below what faults do, and derived from dtype and size."""

import math
from collections.abc import Callable

import pytest
import setups as s
import torch
from setups import Setup
from torch import Tensor, nn
from torch.nn import functional as F

import midstep as ms
from midstep.verifying.operations import seen_by
from midstep.verifying.rounding import LAMBDA, Moved, num_terms, unit_roundoff


def gradient(model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    model.zero_grad()
    s.summed(model, batch).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("depth", [1, 4, 16])
def test_float32_is_within_the_bound_of_float64(depth: int) -> None:
    # The truth in float64 is the oracle: the error of one float32 computation is at most what
    # moved inputs do to it.
    torch.manual_seed(depth)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(32, 32), nn.GELU())]
    model = nn.Sequential(nn.Linear(s.WIDTH, 32), *layers, nn.Linear(32, s.CLASSES))
    x, y = s.pairs()
    found = gradient(model, (x, y))
    with seen_by(Moved(torch.Generator().manual_seed(0))):
        moved = gradient(model, (x, y))
    true = gradient(model.double(), (x.double(), y))
    for a, b, exact in zip(found, moved, true, strict=True):
        error = (a.double() - exact).norm().item()
        assert 0 < error < (a - b).norm().item()
        assert (a - b).norm().item() < 500 * error  # nor is it so wide that faults fit in


@pytest.mark.parametrize("n", [10, 1_000, 100_000, 1_000_000])
def test_a_long_sum_of_one_sign_is_within_the_bound(n: int) -> None:
    # How a kernel adds is its own affair: one after the other, sqrt(n) u is what it may be off.
    x = torch.rand(n, generator=s.seeded()) + 0.1
    error = abs((x.cumsum(0)[-1] - x.double().sum()).item())
    drifts = []
    for seed in range(8):
        with seen_by(Moved(torch.Generator().manual_seed(seed))):
            drifts.append(abs((x.cumsum(0)[-1] - x.double().sum()).item()))
    assert error < max(drifts)
    # Independent signs alone would average out: 1.6e-6 of a million terms, where this is 1.8e-4.
    assert max(drifts) > 0.5 * math.sqrt(n) * unit_roundoff(torch.float32) * x.sum().item()
    assert max(drifts) < 4 * LAMBDA * math.sqrt(n) * unit_roundoff(torch.float32) * x.sum().item()


def test_the_number_of_terms_is_read_from_the_shapes() -> None:
    mm = torch.ops.aten.mm.default
    assert num_terms(mm, [torch.ones(2, 3), torch.ones(3, 4)]) >= 3
    assert num_terms(mm, [torch.ones(2, 999), torch.ones(999, 4)]) >= 999
    image, kernel = torch.ones(2, 3, 9, 9), torch.ones(8, 3, 5, 5)
    assert num_terms(torch.ops.aten.convolution.default, [image, kernel]) >= 3 * 5 * 5
    assert num_terms(torch.ops.aten.mul.Tensor, [torch.ones(9, 999)]) == 4


def test_cancellation_widens_the_bound() -> None:
    def loss_of(shift: float) -> Callable[[nn.Module, Tensor], Tensor]:
        # The same gradient, computed through numbers that are `shift` larger.
        return lambda model, x: ((model(x) + shift) - shift).square().sum()

    bounds = [
        ms.verify(s.mlp(), s.vectors(), loss_of(shift), count=ms.rows()).bound
        for shift in (0.0, 1e3, 1e6)
    ]
    assert bounds[1] > 30 * bounds[0]
    assert bounds[2] > 30 * bounds[1]


def test_where_rounding_hides_the_planted_faults_there_is_no_certificate() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return ((model(x) + 1e17) - 1e17).square().sum() + 1e-12 * model(x).sum()

    certificate = ms.verify(s.mlp(), s.vectors(), loss, count=ms.rows())
    assert certificate.outcome == "no certificate"
    assert certificate.exit_code == 2
    assert not all(control.told_apart for control in certificate.controls)
    assert "NOT told apart" in str(certificate)


@pytest.mark.parametrize("share", [1e-6, 1e-9, 1e-11])
def test_a_fault_of_any_size_above_rounding_is_seen(share: float) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0])
        crossing = F.cross_entropy(logits @ logits.T, torch.arange(len(logits)), reduction="sum")
        return F.cross_entropy(logits, batch[1], reduction="sum") + share * crossing

    certificate = ms.verify(s.mlp(), s.pairs(), loss, count=ms.targets())
    assert not certificate.equal
    assert certificate.reasons[0].kind == "loss"


def test_a_part_in_float32_inside_of_a_float64_model_is_given_its_due() -> None:
    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.float() * 1.1).to(x.dtype)

    wide = Setup(s.mlp(), s.pairs(), s.summed, ms.targets()).verify()
    narrow = Setup(s.mlp(Narrow()), s.pairs(), s.summed, ms.targets()).verify()
    assert narrow.equal
    assert narrow.dtype == wide.dtype == "float64"
    assert narrow.bound > 1e6 * wide.bound


def test_rounding_leaves_whole_numbers_and_choices_alone() -> None:
    with seen_by(Moved(torch.Generator().manual_seed(0))):
        mask = torch.tensor([0.0, 1.0, 3.0])
        assert (mask * 1.0).tolist() == [0.0, 1.0, 3.0]
        assert torch.tensor([2.0, 0.3]).to(torch.int64).tolist() == [2, 0]
        values = torch.tensor([0.1, 0.3, 0.3])
        assert torch.equal(values.amax(), values[1])
        assert not torch.equal(values * 0.7, torch.tensor([0.07, 0.21, 0.21]))


def test_results_are_written_where_the_operation_was_told_to() -> None:
    out, other = torch.zeros(2), torch.tensor([0.1, 0.2])
    with seen_by(Moved(torch.Generator().manual_seed(0))):
        torch.mul(other, 0.3, out=out)
        other.add_(0.5)
    assert torch.allclose(out, torch.tensor([0.03, 0.06]), rtol=1e-4)
    assert torch.allclose(other, torch.tensor([0.6, 0.7]), rtol=1e-4)
