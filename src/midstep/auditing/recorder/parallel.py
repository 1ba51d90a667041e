"""Ranks: the data-parallel wrapper, and collectives that the loop calls itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..events import Collective, Forward
from .core import Recorder

__all__ = ["watch_ranks"]


def watch_ranks(recorder: Recorder) -> None:
    """Watch forwards of DistributedDataParallel, and `all_reduce` of gradients.

    Args:
        recorder: Writes it down.
    """
    last: list[weakref.ref[Any]] = []

    def syncs() -> bool | None:
        module = last[-1]() if last else None
        return None if module is None else bool(module.require_backward_grad_sync)

    def watch_forward(original: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.is_active and torch.is_grad_enabled():
                last[:] = [weakref.ref(self)]
                recorder.add(
                    Forward(
                        recorder.here(),
                        recorder.others.of(self),
                        bool(self.require_backward_grad_sync),
                        recorder.keys_of_module(self),
                    )
                )
            return original(self, *args, **kwargs)

        return forward

    recorder.syncs = syncs
    recorder.patches.attribute(DistributedDataParallel, "forward", watch_forward)
    if torch.distributed.is_available():
        for name in ("all_reduce", "reduce_scatter_tensor", "all_reduce_coalesced"):
            function = getattr(torch.distributed, name, None)
            if function is not None:
                recorder.patches.function(function, _reducing(recorder, name))


def _reducing(recorder: Recorder, name: str) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def collective(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.is_active and not recorder.depth and isinstance(tensor, torch.Tensor):
                keys = recorder.keys_of_grads([tensor])
                recorder.add(Collective(recorder.here(), name, keys))
                result = original(tensor, *args, **kwargs)
                if keys:
                    recorder.settle()
                return result
            return original(tensor, *args, **kwargs)

        return collective

    return watch
