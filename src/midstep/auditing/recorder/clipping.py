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
    # torch's clip is made of the two others: only the outermost call is written down.
    depth = [0]
    function(clip_grad.clip_grad_norm_, _clipping(recorder, depth, _by_norm))
    function(clip_grad.clip_grad_value_, _clipping(recorder, depth, _by_value))
    for name, made in (("clip_grads_with_norm_", _with_norm), ("get_total_norm", None)):
        split = getattr(torch.nn.utils, name, None)
        if split is not None:
            watch = _looking(recorder, depth) if made is None else _clipping(recorder, depth, made)
            function(split, watch)
    recorder.patches.attribute(Tensor, "nan_to_num_", _replacing(recorder))
    recorder.patches.attribute(Tensor, "norm", _looking(recorder, depth))
    for norm in (torch.norm, torch.linalg.vector_norm, torch.linalg.norm):
        function(norm, _looking(recorder, depth))


# The names that torch gives its arguments, since callers may use them; `call` is the watched clip.


def _by_norm(call: Callable[..., Any]) -> Any:
    def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        raises = bool(kwargs.get("error_if_nonfinite", len(args) > 1 and args[1]))
        return call("norm", parameters, max_norm, *args, _raises=raises, **kwargs)

    return clip_grad_norm_


def _by_value(call: Callable[..., Any]) -> Any:
    def clip_grad_value_(parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> Any:
        return call("value", parameters, clip_value, *args, **kwargs)

    return clip_grad_value_


def _with_norm(call: Callable[..., Any]) -> Any:
    def clip_grads_with_norm_(
        parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return call("norm", parameters, max_norm, total_norm, *args, _norm=total_norm, **kwargs)

    return clip_grads_with_norm_


def _clipping(
    recorder: Recorder, depth: list[int], named: Callable[[Callable[..., Any]], Any]
) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def clip(
            by: str,
            parameters: Any,
            limit: float,
            *args: Any,
            _raises: bool = False,
            _norm: Any = None,
            **kwargs: Any,
        ) -> Any:
            if not recorder.is_active or depth[0]:
                return original(parameters, limit, *args, **kwargs)
            was_iterator = isinstance(parameters, Iterator)
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            keys = recorder.parameters.keys_of(given)
            event = Clip(recorder.here(), by, keys, keys, len(given), float(limit))
            event.was_iterator = was_iterator
            event.inside = recorder.inside[-1] if recorder.inside else None
            event.raises = _raises
            recorder.look()
            having = [p for p in given if p.grad is not None]
            event.params = recorder.parameters.keys_of(having)
            event.is_local = ranks()[1] > 1 and any(
                is_sharded(p) and not hasattr(p, "to_local") for p in having
            )
            depth[0] += 1
            try:
                # An iterator stays one: torch warns of an empty generator.
                again = (p for p in given) if was_iterator else given
                result = original(again, limit, *args, **kwargs)
            finally:
                depth[0] -= 1
            try:
                _measure(recorder, event, result if _norm is None else _norm, having)
            except FAILURES:
                recorder.num_unmeasured += 1
            recorder.add(event)
            recorder.settle()
            return result

        return named(clip)

    return watch


def _measure(recorder: Recorder, event: Clip, norm: Any, params: list[Tensor]) -> None:
    if event.by == "norm" and recorder.is_close:
        event.norm = number(norm)
        if math.isinf(event.norm):
            # Finite gradients times threshold / inf are 0; infinite ones become nan.
            grads = [p.grad for p in params if p.grad is not None]
            event.all_finite = not any(bool(torch.isnan(grad).any()) for grad in grads)


def _looking(recorder: Recorder, depth: list[int]) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def look(*args: Any, **kwargs: Any) -> Any:
            if not recorder.is_active or depth[0] or not args:
                return original(*args, **kwargs)
            tensors, *others = args
            if isinstance(tensors, Iterator):
                tensors = list(tensors)
            depth[0] += 1  # `Tensor.norm` calls `torch.norm`
            try:
                result = original(tensors, *others, **kwargs)
            finally:
                depth[0] -= 1
            given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            keys = recorder.keys_of_grads(given)
            if keys:
                event = Clip(
                    recorder.here(), "norm", keys, keys, len(given), math.inf, is_look=True
                )
                if recorder.is_close:
                    event.norm = number(result)
                recorder.add(event)
            return result

        return look

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
