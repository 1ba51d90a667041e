"""State: what is made, cast, saved, loaded, recomputed, and read by the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer, lr_scheduler
from torch.utils import checkpoint

from ..events import Asked, Cast, HostRead, Loaded, Recompute, Saved
from .clocks import descendants
from .core import Recorder
from .graphs import SIXTEEN_BITS
from .losses import FAILURES

__all__ = ["watch_modules", "watch_reads", "watch_recompute", "watch_state"]


def watch_modules(recorder: Recorder) -> None:
    """Watch where parameters are made, batch norms run, and modules are cast to 16 bits.

    Args:
        recorder: Writes it down.
    """

    def registering(original: Any) -> Any:
        def register_parameter(self: Any, name: str, param: Any) -> None:
            original(self, name, param)
            if recorder.is_active and param is not None:
                recorder.remember(param)

        return register_parameter

    def normalizing(original: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.is_active and self.training and torch.is_grad_enabled():
                place = recorder.made_at(self.weight) if self.weight is not None else None
                if place is not None:
                    recorder.batch_norms[id(self)] = place
            return original(self, *args, **kwargs)

        return forward

    recorder.patches.attribute(torch.nn.Module, "register_parameter", registering)
    recorder.patches.attribute(_BatchNorm, "forward", normalizing)
    for name in ("to", "bfloat16", "half"):
        recorder.patches.attribute(torch.nn.Module, name, _casting(recorder))


def _casting(recorder: Recorder) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def cast(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = _dtype_of(self)
            result = original(self, *args, **kwargs)
            after = _dtype_of(self)
            if recorder.is_active and after != before and after in SIXTEEN_BITS:
                recorder.add(Cast(recorder.here(), SIXTEEN_BITS[after]))
            return result

        return cast

    return watch


def _dtype_of(module: torch.nn.Module) -> torch.dtype | None:
    first = next(module.parameters(), None)
    return None if first is None else first.dtype


def watch_recompute(recorder: Recorder) -> None:
    """Watch blocks that are recomputed without keeping the random state.

    Args:
        recorder: Writes it down.
    """

    def watch(original: Any) -> Any:
        def recomputed(function: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.is_active or kwargs.get("preserve_rng_state", True):
                return original(function, *args, **kwargs)
            before = _random_state()
            result = original(function, *args, **kwargs)
            pairs = zip(before, _random_state(), strict=True)
            drew = any(not torch.equal(one, other) for one, other in pairs)
            recorder.add(Recompute(recorder.here(), drew))
            return result

        return recomputed

    recorder.patches.function(checkpoint.checkpoint, watch)


def _random_state() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states


def watch_state(recorder: Recorder) -> None:
    """Watch what a resume loads, and what a checkpoint asks for.

    Args:
        recorder: Writes it down.
    """
    schedules = [lr_scheduler.LRScheduler, *descendants(lr_scheduler.LRScheduler)]
    owners = [(Optimizer, "optimizer"), (GradScaler, "scaler")]
    owners += [(cls, "schedule") for cls in schedules]
    for cls, what in owners:
        if "load_state_dict" in vars(cls):
            recorder.patches.attribute(cls, "load_state_dict", _loading(recorder, what))
        if "state_dict" in vars(cls):
            recorder.patches.attribute(cls, "state_dict", _saving(recorder, what))
    recorder.patches.function(torch.set_rng_state, _noting(recorder, Loaded, "random state"))
    recorder.patches.function(torch.get_rng_state, _noting(recorder, Saved, "random state"))
    recorder.patches.function(torch.save, _noting(recorder, Saved, "file"))
    recorder.patches.function(torch.load, _noting(recorder, Loaded, "file"))


def _loading(recorder: Recorder, what: str) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if recorder.is_active:
                is_empty = isinstance(self, Optimizer) and not self.state
                recorder.add(Loaded(recorder.here(), what, is_empty))
            return result

        return load_state_dict

    return watch


def _saving(recorder: Recorder, what: str) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.is_active:
                recorder.add(Saved(recorder.here(), what))
            return original(self, *args, **kwargs)

        return state_dict

    return watch


def _noting(recorder: Recorder, kind: Any, what: str) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if recorder.is_active and recorder.here() is not None:
                recorder.add(kind(recorder.here(), what))
            return result

        return noted

    return watch


def watch_reads(recorder: Recorder) -> None:
    """Watch `.item()` of a loss, which waits for the device, and questions whether it is finite.

    Args:
        recorder: Writes it down.
    """

    def watch(original: Any) -> Any:
        def item(self: Tensor) -> Any:
            if recorder.is_active and self.grad_fn is not None:
                recorder.add(HostRead(recorder.here(), self.device.type != "cpu"))
            return original(self)

        return item

    recorder.patches.attribute(Tensor, "item", watch)
    recorder.patches.attribute(Tensor, "__float__", watch)
    for function in (torch.isnan, torch.isinf, torch.isfinite, torch.nan_to_num):
        recorder.patches.function(function, _asking(recorder))
    for name in ("isnan", "isinf", "isfinite", "nan_to_num"):
        recorder.patches.attribute(Tensor, name, _asking(recorder))


def _asking(recorder: Recorder) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def asked(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(tensor, *args, **kwargs)
            if recorder.is_active and recorder.is_close and isinstance(tensor, Tensor):
                try:
                    _note_asked(recorder, tensor)
                except FAILURES:
                    recorder.num_unmeasured += 1
            return result

        return asked

    return watch


def _note_asked(recorder: Recorder, tensor: Tensor) -> None:
    is_loss = tensor.numel() == 1 and (tensor.grad_fn is not None or recorder.is_loss(tensor))
    keys = recorder.keys_of_grads([tensor])
    if (is_loss or keys) and not math.isfinite(float(tensor.detach().abs().max())):
        recorder.add(Asked(recorder.here(), keys))
