"""What a check may meet: odd parameters, optimizers, contexts; and what it cannot explain."""

import pytest
import setups as s
import torch
from torch import Tensor, nn

import midstep as ms


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(s.WIDTH, s.CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(s.WIDTH, s.CLASSES, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()


def test_a_parameter_of_no_dimension_with_a_fused_optimizer_that_has_state() -> None:
    model = Scaled()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    s.summed(model, s.pairs()).backward()
    optimizer.step()
    certificate = ms.verify(model, s.pairs(), s.summed, count=ms.targets(), optimizer=optimizer)
    assert certificate.equal, str(certificate)


def test_a_scheduler_that_watches_the_optimizer_sees_no_step() -> None:
    model = Scaled()
    optimizer = torch.optim.Adam(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = optimizer.step
    assert ms.verify(model, s.pairs(), s.summed, count=ms.targets(), optimizer=optimizer).equal
    assert optimizer.step == before
    assert not optimizer.state


def test_complex_parameters_are_certified() -> None:
    certificate = ms.verify(Complex(), s.pairs(), s.summed, count=ms.targets())
    assert certificate.equal, str(certificate)
    assert certificate.dtype == "complex128"


def test_autocast_and_no_grad_around_the_check_do_not_reach_it() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        certificate = ms.verify(s.mlp(), s.pairs(), s.summed, count=ms.targets())
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert certificate.equal
    assert certificate.bound < 1e-12


def test_rows_that_are_all_alike_prove_nothing() -> None:
    batch = torch.ones(8, s.WIDTH), torch.zeros(8, dtype=torch.int64)
    certificate = ms.verify(s.mlp(), batch, s.summed, count=ms.targets())
    assert certificate.outcome == "no certificate"
    assert [c.told_apart for c in certificate.controls] == [
        True,
        False,
        True,
    ]


def test_an_optimizer_that_wants_a_closure_is_refused() -> None:
    model = Scaled()
    with pytest.raises(TypeError, match="evaluates the loss as often as it likes"):
        ms.verify(
            *(model, s.pairs(), s.summed),
            count=ms.targets(),
            optimizer=torch.optim.LBFGS(model.parameters()),
        )


def test_an_optimizer_of_another_model_and_a_clip_without_one_are_refused() -> None:
    other = torch.optim.SGD(Scaled().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="steps none of this model's"):
        ms.verify(Scaled(), s.pairs(), s.summed, count=ms.targets(), optimizer=other)
    with pytest.raises(ValueError, match="acts on an update"):
        ms.verify(Scaled(), s.pairs(), s.summed, count=ms.targets(), clip=ms.ByGlobalNorm(1.0))


def test_what_no_experiment_explains_is_not_certified_and_said_to_be_unexplained() -> None:
    model = s.mlp()
    model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    (reason,) = ms.verify(model, s.pairs(), s.summed, count=ms.targets()).reasons
    assert reason.kind == "unexplained"
    assert "hooks that change gradients" in reason.remedy
