"""Steps: optimizers, what clears gradients, and the gradient scaler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..events import ScalerStep, ScalerUpdate, Step, Unscale
from .core import Recorder
from .losses import FAILURES, number

__all__ = ["watch_optimizers", "watch_scalers"]

_HAS_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


def watch_optimizers(recorder: Recorder) -> None:
    """Watch every optimizer made, cleared and stepped.

    Steps are seen by torch's own global hooks, so that fused, foreach and foreign optimizers are
    seen alike.

    Args:
        recorder: Writes it down.
    """
    handles = [
        register_optimizer_step_pre_hook(_before_step(recorder)),
        register_optimizer_step_post_hook(_after_step(recorder)),
    ]
    recorder.letting_go.extend(handle.remove for handle in handles)
    recorder.patches.attribute(Optimizer, "__init__", _making(recorder))
    recorder.patches.attribute(Optimizer, "zero_grad", _clearing(recorder, "optimizer"))
    recorder.patches.attribute(torch.nn.Module, "zero_grad", _clearing(recorder, "module"))


def _making(recorder: Recorder) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - its place
            original(self, *args, **kwargs)
            if recorder.is_active:
                recorder.remember(self)
                recorder.know(self)

        return __init__

    return watch


def _clearing(recorder: Recorder, by: str) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if recorder.is_active and not recorder.depth:
                if isinstance(self, torch.nn.Module):
                    keys = recorder.keys_of_module(self)
                else:
                    recorder.know(self)
                    keys = recorder.parameters.watched[id(self)].keys
                recorder.cleared(keys, by, recorder.here())
                recorder.parameters.marks = {
                    **recorder.parameters.marks,
                    **recorder.parameters.look(),
                }
            return result

        return zero_grad

    return watch


def _before_step(recorder: Recorder) -> Callable[..., None]:
    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not recorder.is_active or recorder.depth:
            return
        mine = recorder.know(optimizer)
        recorder.look()
        recorder.before_step = len(recorder.events)
        if _has_closure(args, kwargs):
            recorder.inside.append(mine)

    return hook


def _after_step(recorder: Recorder) -> Callable[..., None]:
    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not recorder.is_active:
            return
        if recorder.depth:
            # A hook that steps in the middle of a backward: whose gradients are where is not known.
            recorder.count_update()
            return
        mine = recorder.know(optimizer)
        has_closure = _has_closure(args, kwargs)
        if has_closure and mine in recorder.inside:
            del recorder.inside[recorder.inside.index(mine) :]
        elif not has_closure:
            recorder.forget_looks()
        parameters = recorder.parameters
        keys = parameters.watched[id(optimizer)].keys
        have = parameters.intern(key for key in keys if parameters.marks.get(key) is not None)
        event = Step(
            recorder.here(),
            mine,
            have,
            tuple(number(group["lr"]) for group in optimizer.param_groups if "lr" in group),
            scaler=recorder.scaler_now,
            had_closure=has_closure,
        )
        try:
            found_inf = getattr(optimizer, "found_inf", None)
            if found_inf is not None and recorder.is_close:
                event.found_inf = number(found_inf)
            if recorder.is_close:
                event.grads_finite = _all_finite(parameters.grads(have))
                if have and not recorder.has_new(have):
                    event.made_by_hand = any(bool(g.any()) for g in parameters.grads(have))
        except FAILURES:
            recorder.num_unmeasured += 1
        recorder.add(event)
        recorder.count_update()

    return hook


def _all_finite(grads: list[Any]) -> bool | None:
    """Whether every gradient is finite; None where that cannot be asked on one rank alone."""
    plain = [g.detach() for g in grads if g.layout == torch.strided and not hasattr(g, "to_local")]
    if not plain:
        return None
    if len({(g.device, g.dtype) for g in plain}) > 1:
        return all(bool(torch.isfinite(g).all()) for g in plain)
    largest = torch.stack(torch._foreach_norm(plain, math.inf))
    return bool((largest - largest == 0).all())  # inf - inf is nan, as is nan - nan


def _has_closure(args: Any, kwargs: Any) -> bool:
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure is not None


def watch_scalers(recorder: Recorder) -> None:
    """Watch gradient scalers.

    Args:
        recorder: Writes it down.
    """
    patch = recorder.patches.attribute
    patch(GradScaler, "scale", _scaling(recorder))
    patch(GradScaler, "unscale_", _unscaling(recorder))
    patch(GradScaler, "step", _scaler_step(recorder))
    patch(GradScaler, "update", _updating(recorder))


def _scale_of(scaler: GradScaler) -> float:
    scale = scaler._scale  # noqa: SLF001 - `get_scale` would wait for the device
    return math.nan if scale is None else number(scale)


def _scaling(recorder: Recorder) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def scale(self: GradScaler, outputs: Any) -> Any:
            result = original(self, outputs)
            if recorder.is_active and self.is_enabled():
                value = _scale_of(self) if recorder.is_close else math.nan
                recorder.scaled = recorder.scalers.of(self), value
            return result

        return scale

    return watch


def _unscaling(recorder: Recorder) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def unscale_(self: GradScaler, optimizer: Optimizer) -> None:
            if not recorder.is_active or not self.is_enabled():
                original(self, optimizer)
                return
            if recorder.scaler_now is not None:
                original(self, optimizer)
                recorder.settle()
                return
            real = real_optimizer(optimizer)
            mine = recorder.know(real)
            recorder.look()
            scale = _scale_of(self) if recorder.is_close else math.nan
            event = Unscale(recorder.here(), recorder.scalers.of(self), mine, scale)
            try:
                original(self, optimizer)
            except RuntimeError as error:
                # Called before, or after a step, since the last update.
                event.again = "unscale_()" in str(error)
                raise
            finally:
                recorder.add(event)
                recorder.settle()

        return unscale_

    return watch


def _scaler_step(recorder: Recorder) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not recorder.is_active or not self.is_enabled():
                return original(self, optimizer, *args, **kwargs)
            real = real_optimizer(optimizer)
            mine, number_of_scaler = recorder.know(real), recorder.scalers.of(self)
            recorder.look()
            before = len(recorder.events)
            scale = _scale_of(self) if recorder.is_close else math.nan
            event = ScalerStep(recorder.here(), number_of_scaler, mine, scale)
            recorder.scaler_now = number_of_scaler
            try:
                result = original(self, optimizer, *args, **kwargs)
            except RuntimeError as error:
                event.again = "already been called" in str(error)
                raise
            except AssertionError as error:
                event.is_empty = "No inf checks" in str(error)
                raise
            finally:
                recorder.scaler_now = None
                steps = [e for e in recorder.events[before:] if isinstance(e, Step)]
                event.applied = any(s.optimizer == mine and s.found_inf == 0 for s in steps)
                recorder.add(event)
            return result

        return step

    return watch


def _updating(recorder: Recorder) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def update(self: GradScaler, new_scale: Any = None) -> None:
            if not recorder.is_active or not self.is_enabled():
                original(self, new_scale)
                return
            scale = _scale_of(self) if recorder.is_close else math.nan
            event = ScalerUpdate(recorder.here(), recorder.scalers.of(self), scale, scale)
            event.given = new_scale is not None
            event.failed = True
            try:
                original(self, new_scale)
                event.failed = False
            finally:
                if recorder.is_close:
                    event.after = _scale_of(self)
                recorder.add(event)

        return update

    return watch


def real_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside those that frameworks wrap around it."""
    while not hasattr(optimizer, "defaults") or type(optimizer).__name__.startswith("Accelerated"):
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "_optimizer", None)
        if inner is None or inner is optimizer:
            break
        optimizer = inner
    return optimizer
