"""Clips: torch's own functions, wherever they were imported."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from ..events import Clip, Replaced
from .core import Recorder, is_sharded, ranks
from .losses import FAILURES, number

__all__ = ["watch_clips"]


def watch_clips(recorder: Recorder) -> None:
    """Watch `clip_grad_norm_`, `clip_grad_value_`, `get_total_norm` and `nan_to_num_`.

    Args:
        recorder: Writes it down.
    """
    function = recorder.patches.function
    function(clip_grad.clip_grad_norm_, _clipping(recorder, "norm"))
    function(clip_grad.clip_grad_value_, _clipping(recorder, "value"))
    if hasattr(clip_grad, "get_total_norm"):
        function(clip_grad.get_total_norm, _looking(recorder))
    recorder.patches.attribute(Tensor, "nan_to_num_", _replacing(recorder))


def _clipping(recorder: Recorder, by: str) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def clip(parameters: Any, limit: float, *args: Any, **kwargs: Any) -> Any:
            if not recorder.is_active:
                return original(parameters, limit, *args, **kwargs)
            was_iterator = isinstance(parameters, Iterator)
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            keys = recorder.parameters.keys_of(given)
            event = Clip(recorder.here(), by, keys, keys, len(given), number(limit))
            event.was_iterator = was_iterator
            event.inside = recorder.inside[-1] if recorder.inside else None
            event.raises = bool(kwargs.get("error_if_nonfinite", len(args) > 1 and args[1]))
            recorder.look()
            having = [p for p in given if p.grad is not None]
            event.params = recorder.parameters.keys_of(having)
            event.is_local = ranks()[1] > 1 and any(
                is_sharded(p) and not hasattr(p, "to_local") for p in having
            )
            # An iterator stays one: torch warns of an empty generator.
            result = original((p for p in given) if was_iterator else given, limit, *args, **kwargs)
            try:
                _measure(recorder, event, result, having)
            except FAILURES:
                recorder.num_unmeasured += 1
            recorder.add(event)
            recorder.settle()
            return result

        # The names that torch gives its arguments: callers may use them.
        if by == "norm":

            def clip_grad_norm_(parameters: Any, max_norm: float, *a: Any, **k: Any) -> Any:
                return clip(parameters, max_norm, *a, **k)

            return clip_grad_norm_

        def clip_grad_value_(parameters: Any, clip_value: float, *a: Any, **k: Any) -> Any:
            return clip(parameters, clip_value, *a, **k)

        return clip_grad_value_

    return watch


def _measure(recorder: Recorder, event: Clip, norm: Any, params: list[Tensor]) -> None:
    if event.by == "norm" and recorder.is_close:
        event.norm = number(norm)
        if math.isinf(event.norm):
            # Finite gradients times threshold / inf are 0; infinite ones become nan.
            grads = [p.grad for p in params if p.grad is not None]
            event.all_finite = not any(bool(torch.isnan(grad).any()) for grad in grads)


def _looking(recorder: Recorder) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def get_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.is_active:
                return original(tensors, *args, **kwargs)
            given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            result = original(given, *args, **kwargs)
            keys = recorder.keys_of_grads(given)
            if keys:
                event = Clip(
                    recorder.here(), "norm", keys, keys, len(given), math.inf, is_look=True
                )
                if recorder.is_close:
                    event.norm = number(result)
                recorder.add(event)
            return result

        return get_total_norm

    return watch


def _replacing(recorder: Recorder) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def nan_to_num_(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            keys = recorder.keys_of_grads([self]) if recorder.is_active else frozenset()
            if keys:
                is_bad = recorder.is_close and not bool(torch.isfinite(self).all())
                recorder.add(Replaced(recorder.here(), keys, is_bad))
            return original(self, *args, **kwargs)

        return nan_to_num_

    return watch
