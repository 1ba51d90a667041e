"""Undoing: a step of an optimizer that was broken off, taken back or known to be whole.

A step changes weights and state one after the other. Broken off by an error, it is taken back from
a copy where there is one; without a copy it is known whether anything was written, by the versions
that torch keeps of every tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["StepGuard"]

_SCALAR = 1  # entries of a step counter, which are always copied


class StepGuard:
    """Watches one step of an optimizer.

    Args:
        optimizer: Whose step may be broken off.
        copies: Whether to copy weights and state before it: the memory of both, and a pass.

    Attributes:
        is_begun: Whether the step has begun.
        is_done: Whether it ran to its end.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, copies: bool) -> None:
        self._optimizer = optimizer
        self._copies = copies
        self._depth = 0  # a step that calls that of its base class has hooks within hooks
        self.is_begun = False
        self.is_done = False
        self._versions: list[tuple[Tensor, int]] = []
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._states: dict[Tensor, dict[str, Any]] = {}
        self._handles = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]

    def close(self) -> None:
        """Stop watching, and let go of the copies."""
        for handle in self._handles:
            handle.remove()
        self._kept = []
        self._versions = []
        self._states = {}

    def undo(self) -> bool:
        """Take back what a broken step has done.

        Returns:
            Whether weights and state are as before it; False where something was written and there
            is no copy.
        """
        if not self.is_begun:
            return True
        if not self._copies and any(t._version != version for t, version in self._versions):  # noqa: SLF001
            return False
        with torch.no_grad():
            for tensor, kept in self._kept:
                tensor.copy_(kept)
        state = self._optimizer.state
        for parameter in list(state):
            if parameter not in self._states:
                del state[parameter]  # made by the broken step, maybe not all of it
        for parameter, before in self._states.items():
            state[parameter].clear()
            state[parameter].update(before)
        return True

    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self.is_begun:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._states = {p: dict(optimizer.state[p]) for p in parameters if p in optimizer.state}
        state = [
            value
            for values in self._states.values()
            for value in values.values()
            if isinstance(value, Tensor)
        ]
        large = [*parameters, *(t for t in state if t.numel() > _SCALAR)]
        copied = [t for t in state if t.numel() <= _SCALAR] + (large if self._copies else [])
        self._versions = [(t, t._version) for t in large]  # noqa: SLF001 - autograd relies on it
        self._kept = [(t, t.detach().clone()) for t in copied]
        self.is_begun = True

    def _end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        self.is_done = self._depth == 0
