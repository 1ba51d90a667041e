"""The published figures of clipping, computed through the library."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import midstep as ms
from midstep.clip import Attempt
from midstep.gradients import Gradients

Clip = Callable[[nn.Module, float], float]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(64, 8)
    return x, x.sum(dim=1, keepdim=True) * 50.0


def grads(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def joint(tensors: list[Tensor]) -> float:
    return torch.cat([t.flatten() for t in tensors]).double().norm().item()


def by_function(module: nn.Module, max_norm: float) -> float:
    return ms.clip_grad_norm_(module.parameters(), max_norm).item()


def by_rule(module: nn.Module, max_norm: float) -> float:
    gradients = Gradients(module.parameters())
    norm = gradients.norm()
    ms.ByGlobalNorm(max_norm).decide(gradients, Attempt(step=0))
    gradients.apply_()
    return norm


BOTH = pytest.mark.parametrize("clip", [by_function, by_rule])


@BOTH
def test_clipping_is_of_the_whole_and_returns_the_norm_before(clip: Clip) -> None:
    module, (x, y) = model(), data()
    F.mse_loss(module(x), y).backward()
    assert joint(grads(module)) == pytest.approx(206.352, abs=5e-4)
    assert clip(module, 1.0) == pytest.approx(206.352, abs=5e-4)
    assert joint(grads(module)) == pytest.approx(1.0, rel=1e-6)
    assert [g.norm().item() for g in grads(module)] == pytest.approx(
        [0.380417, 0.086949, 0.920664, 0.010048], abs=1e-6
    )
    assert clip(module, 1e9) == pytest.approx(1.0, rel=1e-6)  # also where it does not fire


@BOTH
def test_clipping_each_microbatch_is_another_gradient_of_the_same_norm(clip: Clip) -> None:
    x, y = data()

    def accumulated(is_clipped_each: bool) -> list[Tensor]:
        module = model()
        for rows in torch.arange(64).split(16):
            (F.mse_loss(module(x[rows]), y[rows]) / 4).backward()
            if is_clipped_each:
                clip(module, 1.0)
        if not is_clipped_each:
            clip(module, 1.0)
        return grads(module)

    each, once = accumulated(True), accumulated(False)
    assert joint(each) == pytest.approx(1.0, rel=1e-6)
    assert joint(once) == pytest.approx(1.0, rel=1e-6)
    gap = max((a - b).abs().max().item() for a, b in zip(each, once, strict=True))
    assert gap == pytest.approx(0.244837, abs=1e-6)


def poisoned() -> nn.Sequential:
    module, (x, y) = model(), data()
    F.mse_loss(module(x), y).backward()
    weight = module[0].weight
    assert isinstance(weight, nn.Parameter)
    assert weight.grad is not None
    weight.grad[0, 0] = math.inf
    return module


def test_one_infinite_entry_goes_through_torch_as_zeros_and_a_nan() -> None:
    module = poisoned()
    assert nn.utils.clip_grad_norm_(module.parameters(), 1.0).item() == math.inf
    flat = torch.cat([g.flatten() for g in grads(module)])
    assert (flat.numel(), int((flat == 0).sum()), int(flat.isnan().sum())) == (321, 320, 1)


def test_one_infinite_entry_is_refused_here_named_and_nothing_is_touched() -> None:
    module = poisoned()
    before = [g.clone() for g in grads(module)]
    with pytest.raises(ms.NonFiniteGradient) as raised:
        ms.clip_grad_norm_(module.parameters(), 1.0)
    assert raised.value.parameters == {"parameters[0]": 1}
    for old, new in zip(before, grads(module), strict=True):
        assert torch.equal(old, new)


def test_one_infinite_entry_stops_an_update_before_the_clip() -> None:
    x, y = data()
    module = model()
    updater = ms.Updater(
        module, torch.optim.SGD(module.parameters(), lr=0.1), clip=ms.ByGlobalNorm(1.0)
    )
    weights = [p.detach().clone() for p in module.parameters()]
    hook = module[0].weight.register_hook(
        lambda g: g.index_put((torch.tensor(0),) * 2, g.new_tensor(math.inf))
    )
    with pytest.raises(ms.NonFiniteGradient) as raised:
        updater.update(
            [(x, y)],
            lambda m, batch: (m(batch[0]) - batch[1]).square().sum(),
            count=lambda batch: len(batch[0]),
        )
    hook.remove()
    assert raised.value.parameters == {"0.weight": 1}
    for old, new in zip(weights, module.parameters(), strict=True):
        assert torch.equal(old, new)


@BOTH
def test_norm_clipping_keeps_the_direction_that_value_clipping_changes(clip: Clip) -> None:
    by_norm, by_value = nn.ParameterList([torch.zeros(2)]), nn.ParameterList([torch.zeros(2)])
    for module in (by_norm, by_value):
        module[0].grad = torch.tensor([3.0, 4.0])
    assert clip(by_norm, 1.0) == 5.0
    assert grads(by_norm)[0].tolist() == pytest.approx([0.6, 0.8])
    ms.clip_grad_value_(by_value.parameters(), 1.0)
    assert grads(by_value)[0].tolist() == [1.0, 1.0]
    assert ms.total_norm([torch.tensor([3.0]), torch.tensor([4.0])]).item() == 5.0


def test_clipping_before_unscaling_all_but_erases_the_update() -> None:
    def scaled() -> nn.Parameter:
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([3.0, 4.0]) * 1024
        return parameter

    too_early = scaled()
    ms.clip_grad_norm_([too_early], 1.0)
    assert too_early.grad is not None
    too_early.grad /= 1024
    assert joint([too_early.grad]) < 0.001

    in_time = scaled()
    gradients = Gradients([in_time], factor=1 / 1024)  # what is clipped is the true gradient
    ms.ByGlobalNorm(1.0).decide(gradients, Attempt(step=0))
    gradients.apply_()
    assert in_time.grad is not None
    assert joint([in_time.grad]) == pytest.approx(1.0, rel=1e-6)
