"""What a way to accumulate is asked for, and when."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from ..ranks import Ranks

__all__ = ["Accumulation", "attached"]


class Accumulation(Protocol):
    """A way to add up the gradients of a window."""

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks | None
    ) -> None:
        """Take charge of the gradients of a model.

        Raises:
            ValueError: This model, or this way of sharing it, cannot be accumulated so.
        """
        ...

    def begin(self) -> None:
        """A window begins; every gradient is None."""
        ...

    def before_backward(self, *, index: int, syncs: bool) -> None:
        """A backward is about to run.

        Args:
            index: Of the microbatch, from 0.
            syncs: Whether gradients are added up over the ranks in this backward.
        """
        ...

    def after_backward(self) -> None:
        """It has run, or failed."""
        ...

    def finish(self) -> None:
        """Every backward of the window has run, and the gradients are about to be looked at."""
        ...

    def forget(self) -> None:
        """Every gradient has been cleared: keep nothing of them."""
        ...


def attached(
    given: Accumulation | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks | None,
) -> Accumulation | None:
    """Have a way to accumulate take charge of a model; None leaves it to autograd.

    Raises:
        TypeError: It is no such way.
    """
    if given is not None:
        if isinstance(given, type) or not callable(getattr(given, "attach", None)):
            raise TypeError(
                f"`accumulation={given!r}` has no `attach()`, so it cannot add up gradients. Pass "
                "an object such as `midstep.accumulation.Wide()`."
            )
        given.attach(model, optimizer, ranks)
    return given
