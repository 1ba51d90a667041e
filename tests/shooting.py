"""Errors of memory at a chosen operation, as an allocator would raise them: before it is run."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Shooting(TorchDispatchMode):
    """Raises before the n-th operation from now, once for each number given.

    Attributes:
        num_seen: Operations since the last shot.
        fired: The operations that were not run.
    """

    def __init__(self, *after: int) -> None:
        super().__init__()
        self.after = list(after)
        self.num_seen = 0
        self.fired: list[str] = []
        self.is_on = True
        self.has_hooks = False
        self.only = ""  # what the operation is called, if not all but collectives are aimed at

    def only_in(self, optimizer: torch.optim.Optimizer) -> None:
        """Shoot only while an optimizer steps, hooks of its own left out."""
        self.is_on = False
        self.has_hooks = True

        def begin(*_: Any) -> None:
            self.is_on = True

        def end(*_: Any) -> None:
            self.is_on = False

        optimizer.register_step_pre_hook(begin)
        optimizer.register_step_post_hook(end)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A collective that has begun cannot be left.
        is_aimed = self.only in str(func) if self.only else "c10d" not in str(func)
        if self.is_on and is_aimed:
            if self.after and self.num_seen >= self.after[0]:
                self.after.pop(0)
                self.num_seen = 0
                self.fired.append(str(func))
                self.is_on = self.is_on and not self.has_hooks
                raise torch.OutOfMemoryError(f"CUDA out of memory: {func}")
            self.num_seen += 1
        return func(*args, **(kwargs or {}))
