"""One step with the gradient times its factor: folded into the kernel or not, the same update."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_loop import distance, gradients, weights
from torch import Tensor, nn

import midstep as ms

FUSED: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "amsgrad": True}),
    ("AdamW", {"lr": 0.01, "maximize": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    ("Adagrad", {"lr": 0.1, "weight_decay": 0.01}),
    ("Adagrad", {"lr": 0.1, "maximize": True}),
]
NAMES = [f"{name} {' '.join(map(str, settings))}" for name, settings in FUSED]


def layer(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 4).to(dtype)


def optimizer_of(
    model: nn.Module, name: str, settings: dict[str, Any], *, fused: bool
) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = getattr(torch.optim, name)(
        model.parameters(), **settings, fused=fused
    )
    return found


def batches(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 5, generator=generator).to(dtype) for n in (3, 4)]


def square(model: nn.Module, x: Tensor) -> ms.LossSum:
    return ms.LossSum(model(x).square().sum(), len(x))


def run(
    name: str, settings: dict[str, Any], *, fused: bool, dtype: torch.dtype, **stages: Any
) -> tuple[list[Tensor], list[Tensor], ms.Updater]:
    model = layer(dtype)
    updater = ms.Updater(model, optimizer_of(model, name, settings, fused=fused), **stages)
    for _ in range(4):
        updater.update(batches(dtype), square)  # streamed, so that a division is open
    return weights(model), gradients(model), updater


@pytest.mark.parametrize(("name", "settings"), FUSED, ids=NAMES)
@pytest.mark.parametrize("max_norm", [math.inf, 0.1])
@pytest.mark.parametrize("precision", [ms.FP32(), ms.FP16(init_scale=1024.0)])
def test_a_fused_step_is_the_unfused_one_and_leaves_the_true_gradient(
    name: str, settings: dict[str, Any], max_norm: float, precision: Any
) -> None:
    stages = {"clip": ms.ByGlobalNorm(max_norm), "precision": precision}
    plain = run(name, settings, fused=False, dtype=torch.float32, **stages)
    fused = run(name, settings, fused=True, dtype=torch.float32, **stages)
    assert distance(fused[0], plain[0]) < 2e-6
    # The gradient itself, and not its negative where the optimizer maximizes.
    assert distance(fused[1], plain[1]) < 2e-6
    if max_norm < math.inf:
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in fused[1]))
        assert norm == pytest.approx(max_norm, rel=1e-5)


@pytest.mark.parametrize(("name", "settings"), FUSED, ids=NAMES)
def test_in_float64_a_fused_step_keeps_all_digits(name: str, settings: dict[str, Any]) -> None:
    """The kernel's factor is a float32 tensor, which would cost nine of them."""
    stages = {"clip": ms.ByGlobalNorm(0.1)}
    plain = run(name, settings, fused=False, dtype=torch.float64, **stages)
    fused = run(name, settings, fused=True, dtype=torch.float64, **stages)
    assert distance(fused[0], plain[0]) < 1e-12
    assert distance(fused[1], plain[1]) < 1e-12


def test_bfloat16_parameters_are_stepped_with_the_clipped_gradient() -> None:
    before = weights(layer(torch.bfloat16))
    model = layer(torch.bfloat16)
    optimizer = optimizer_of(model, "SGD", {"lr": 0.125}, fused=False)
    updater = ms.Updater(model, optimizer, clip=ms.ByGlobalNorm(0.5))
    updater.update(batches(torch.bfloat16), square)
    for w, b, g in zip(weights(model), before, gradients(model), strict=True):
        assert torch.allclose(w, b - 0.125 * g, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Adagrad"])
def test_bfloat16_parameters_are_stepped_by_fused_kernels_too(name: str) -> None:
    settings = {"lr": 0.01}
    stages = {"clip": ms.ByGlobalNorm(0.1)}
    plain = run(name, settings, fused=False, dtype=torch.bfloat16, **stages)
    fused = run(name, settings, fused=True, dtype=torch.bfloat16, **stages)
    assert distance(fused[0], plain[0]) < 4e-3  # an eighth bit of weights below one
    assert distance(fused[0], weights(layer(torch.bfloat16))) > 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_kernel_that_would_not_move_the_weights_is_refused(
    dtype: torch.dtype, momentum: float
) -> None:
    """As torch 2.13's fused SGD on CPU in half precision: pytorch issue 191763."""
    settings: dict[str, Any] = {"lr": 0.1, "momentum": momentum}
    plain = layer(dtype)
    optimizer_of(plain, "SGD", settings, fused=True)
    for p in plain.parameters():
        p.grad = torch.ones_like(p)
    before = weights(plain)
    optimizer_of(plain, "SGD", settings, fused=True).step()
    moves = all(bool((w != b).all()) for w, b in zip(weights(plain), before, strict=True))
    model = layer(dtype)
    optimizer = optimizer_of(model, "SGD", settings, fused=True)
    if moves:
        ms.Updater(model, optimizer)
    else:
        with pytest.raises(ValueError, match=r"SGD\(fused=True\)` with torch\..*16 parameters"):
            ms.Updater(model, optimizer)
    ms.Updater(model, optimizer_of(model, "SGD", settings, fused=False))


@given(exponent=st.integers(-130, 125), fused=st.booleans())
def test_a_factor_of_any_magnitude_gives_the_clipped_step(exponent: int, fused: bool) -> None:
    """Where the inverse of the factor has no float32 it is not left to the kernel."""
    magnitude = 2.0**exponent
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    updater = ms.Updater(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0, fused=fused),
        clip=ms.ByGlobalNorm(2.0**-10),
    )
    x = torch.tensor([[3.0, 4.0]]) * magnitude
    record = updater.update([x], lambda m, b: ms.LossSum(m(b).sum(), 1))
    true = 5.0 * magnitude
    scale = min(1.0, 2.0**-10 / true) * magnitude
    assert record.grad_norm == pytest.approx(true, rel=1e-6)
    assert model.weight.tolist()[0] == pytest.approx([-3.0 * scale, -4.0 * scale], rel=1e-5)


def test_nothing_is_left_on_a_fused_optimizer() -> None:
    """A plain loop that goes on with it must not divide once more."""
    _, _, updater = run("SGD", {"lr": 0.1}, fused=True, dtype=torch.float32)
    assert not hasattr(updater.optimizer, "grad_scale")
    assert not hasattr(updater.optimizer, "found_inf")


def test_nothing_is_left_on_a_fused_optimizer_whose_step_failed() -> None:
    model = layer()
    optimizer = optimizer_of(model, "SGD", {"lr": 0.1}, fused=True)
    updater = ms.Updater(model, optimizer)

    def fail(*_: Any) -> None:
        raise MemoryError

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(MemoryError):
        updater.update(batches(), square)
    assert not hasattr(optimizer, "grad_scale")
    assert gradients(model) == []
    assert updater.clock.step == 0
    handle.remove()
    assert updater.update(batches(), square).applied


@pytest.mark.parametrize("fused", [True, False])
def test_the_optimizer_is_stepped_once_and_its_hooks_run(fused: bool) -> None:
    model = layer()
    optimizer = optimizer_of(model, "AdamW", {"lr": 0.1}, fused=fused)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    ms.Updater(model, optimizer).update(batches(), square)
    assert calls == ["before", "after"]
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_a_factor_for_each_tensor_is_applied_before_a_fused_step() -> None:
    stages = {"clip": ms.ByTensorNorm(0.1)}
    plain = run("AdamW", {"lr": 0.01}, fused=False, dtype=torch.float32, **stages)
    fused = run("AdamW", {"lr": 0.01}, fused=True, dtype=torch.float32, **stages)
    assert distance(fused[0], plain[0]) < 1e-6
    for grad in fused[1]:
        assert grad.norm().item() == pytest.approx(0.1, rel=1e-5)


def test_where_no_factor_is_open_the_gradient_is_not_touched() -> None:
    """Counted, unclipped and unscaled: autograd's own tensors are what the optimizer reads."""
    model = layer()
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1))
    window = next(windows := updater.windows(batches(), size=2, count=ms.rows()))
    for x in window:
        window.backward(model(x).square().sum())
    versions = [p.grad._version for p in model.parameters() if p.grad is not None]
    window.step()
    assert [p.grad._version for p in model.parameters() if p.grad is not None] == versions
    windows.close()  # type: ignore[attr-defined]
