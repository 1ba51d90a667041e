"""Stepping: one optimizer step with the gradient times its factor, in as few passes as there are.

The fused optimizers (`fused=True`: Adam, AdamW, SGD, Adagrad) divide by `grad_scale` while they
read the gradient anyway, and write the true gradient back to `.grad`. The others get one
multiplication before, none when the factor is 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from .gradients import Gradients

__all__ = [
    "AveragesWeights",
    "check_optimizer",
    "is_begun",
    "lr_of",
    "parameters_of",
    "skips_on_device",
    "stage_of",
    "step",
    "step_unread",
    "weight_decays_of",
]

Stage = TypeVar("Stage")
Take = Callable[[torch.optim.Optimizer], None]

# grad_scale is a float32 tensor: a factor outside this range would leave its range when inverted.
_FOLDABLE = (2.0**-100, 2.0**100)
_HALF = frozenset({torch.float16, torch.bfloat16})
_FACTOR_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


class AveragesWeights(Protocol):
    """An average of the weights, such as `torch.optim.swa_utils.AveragedModel`."""

    def update_parameters(self, model: nn.Module) -> None:
        """Take the present weights into the average."""
        ...


def step(optimizer: torch.optim.Optimizer, gradients: Gradients, take: Take | None = None) -> None:
    """Step the optimizer with the true gradients; afterwards `.grad` holds them.

    Args:
        optimizer: To step.
        gradients: Its gradients, and the factor on them.
        take: Calls the optimizer's step; None to call it.
    """
    factor, take = gradients.factor, take or _take
    if gradients.is_wide:
        gradients.narrow_()
        take(optimizer)
    elif factor == 1.0:
        take(optimizer)
    elif factor is None or not _folds(optimizer, gradients, factor):
        gradients.apply_()
        take(optimizer)
    else:
        _step_folded(optimizer, gradients, factor, take)
    # A caller's autocast around the whole loop would go on with its copies of the weights before.
    torch.clear_autocast_cache()


def _folds(optimizer: torch.optim.Optimizer, gradients: Gradients, factor: float) -> bool:
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if not _FOLDABLE[0] < factor < _FOLDABLE[1]:
        return False
    # In float64 a float32 factor would cost nine digits.
    return all(t.dtype in _FACTOR_DTYPES for t in gradients.tensors)


def _take(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _step_folded(optimizer: Any, gradients: Gradients, factor: float, take: Take) -> None:
    device = gradients.tensors[0].device
    optimizer.grad_scale = torch.full((), 1.0 / factor, dtype=torch.float32, device=device)
    try:
        take(optimizer)
    finally:
        del optimizer.grad_scale
    gradients.hand_over_()


def step_unread(
    optimizer: Any,
    gradients: Gradients,
    factor: Tensor,
    found_inf: Tensor,
    take: Take | None = None,
) -> None:
    """Step by a factor that lies on the device, or leave all as it is, which the kernel decides.

    Args:
        optimizer: One that `skips_on_device`.
        gradients: Without a pending factor of their own.
        factor: Of every gradient. Shape [], wide.
        found_inf: 1 to change neither weights nor optimizer state, else 0. Shape [], float32.
        take: Calls the optimizer's step; None to call it.
    """
    if gradients.is_wide:
        gradients.narrow_(factor)
    elif all(t.dtype in _FACTOR_DTYPES for t in gradients.tensors):
        optimizer.grad_scale = (1.0 / factor).float()
    else:
        with torch.no_grad():
            torch._foreach_mul_(gradients.tensors, factor)
    optimizer.found_inf = found_inf
    try:
        (take or _take)(optimizer)
    finally:
        vars(optimizer).pop("grad_scale", None)
        del optimizer.found_inf
    torch.clear_autocast_cache()


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's kernel itself leaves everything as it is when told to."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused") for group in optimizer.param_groups
    )


def is_begun(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step that is skipped on the device would leave no trace in the optimizer's state.

    SGD makes its momentum in the first step, from memory that a skipped kernel never writes.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    return all(
        optimizer.state.get(p, {}).get("momentum_buffer") is not None
        for group in optimizer.param_groups
        if group["momentum"]
        for p in group["params"]
        if p.grad is not None
    )


def lr_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Read the rate of each parameter group; a rate kept on an accelerator costs a host sync."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def weight_decays_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Read the weight decay of each parameter group, 0 where it has none."""
    return [float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups]


def check_optimizer(optimizer: object) -> None:
    """Refuse what cannot be stepped once per window.

    Raises:
        TypeError: It is no optimizer, or its `step` wants a closure.
        ValueError: Its kernel in this version of torch leaves these parameters as they are.
    """
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
        raise TypeError(
            f"`optimizer` is a `{type(optimizer).__name__}`, without `param_groups` and `step()`. "
            "Pass a torch.optim.Optimizer."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"`{type(optimizer).__name__}.step(closure)` evaluates the loss as often as it likes, "
            "so there is no one gradient of a window to clip and no one update to count. Use it "
            "with a loop of its own, or take an optimizer that steps on `.grad`."
        )
    if isinstance(optimizer, torch.optim.SGD):
        _check_fused_sgd(optimizer)


def _check_fused_sgd(optimizer: torch.optim.SGD) -> None:
    """Ask the kernel itself: on CPU some versions skip half precision (pytorch issue 191763)."""
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        for dtype in {p.dtype for p in group["params"] if p.is_cpu} & _HALF:
            probe = torch.ones(64, dtype=dtype, requires_grad=True)
            probe.grad = torch.ones_like(probe)
            torch.optim.SGD([probe], lr=1.0, fused=True).step()
            if probe.any():
                raise ValueError(
                    f"`SGD(fused=True)` with {dtype} parameters on CPU: the kernel of torch "
                    f"{torch.__version__} leaves most of them as they are, so the model would not "
                    "train. Pass `fused=False`."
                )


def stage_of(name: str, given: Stage | None, default: Stage, method: str) -> Stage:
    """Take the stage that was given, or the default.

    Raises:
        TypeError: It lacks the method by which stages of its kind are asked, or is a class.
    """
    if given is None:
        return default
    if isinstance(given, type) or not callable(getattr(given, method, None)):
        raise TypeError(
            f"`{name}={given!r}` has no `{method}()`, so it cannot do this part of an update. Pass "
            f"an object such as `{default!r}`."
        )
    return given


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List every parameter the optimizer steps, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]
