"""Blame: which parameter, which microbatch, and what model and optimizer do not share."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .errors import EmptyWindow, NonFiniteGradient, WindowError
from .gradients import Gradients
from .ranks import Ranks
from .snapshot import Buffers, RandomState

__all__ = [
    "Culprit",
    "empty_error",
    "first_bad_microbatch",
    "names_of",
    "no_gradient_error",
    "plain_name",
    "report_strangers",
    "unread_error",
]


def names_of(model: nn.Module, parameters: Sequence[Tensor]) -> list[str]:
    """Name parameters as the model does; those it does not know by their position.

    What compiling and wrapping prepend to names is left out.
    """
    known = {id(p): plain_name(name) for name, p in model.named_parameters()}
    return [
        known.get(id(p), f"parameter {i} of the optimizer, shape {list(p.shape)}")
        for i, p in enumerate(parameters)
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class Culprit:
    """Where a gradient that is not finite came from, as far as all ranks together know.

    Attributes:
        parameters: Number of non-finite entries by name.
        microbatch: Position in its window, from 0; None where it does not show.
        rank: Whose microbatch; None on one rank alone.
    """

    parameters: Mapping[str, int]
    microbatch: int | None
    rank: int | None = None

    @classmethod
    def found(
        cls,
        ranks: Ranks | None,
        gradients: Gradients | None,
        names: Sequence[str],
        microbatch: int | None,
        parameters: Mapping[str, int] | None = None,
    ) -> Culprit:
        """Count, and ask the other ranks: one collective, on the way to a skip or an error.

        Args:
            ranks: The other ranks, if any.
            gradients: What to count in; None to take `parameters` as counted.
            names: Of the gradients.
            microbatch: What this rank knows.
            parameters: What was counted before.
        """
        counts: dict[str, float] = dict(parameters or {})
        if gradients is not None:
            numbers = gradients.num_nonfinite()
            counts = {name: n for name, n in zip(names, numbers, strict=True) if n}
        if ranks is None:
            return cls({name: int(n) for name, n in counts.items()}, microbatch)
        if gradients is not None:
            replicas = [ranks.sharing.replicas(p) for p in gradients.parameters]
            share = dict(zip(names, replicas, strict=True))
            counts = {name: n / share[name] for name, n in counts.items()}
        everyone = ranks.world.gather_objects((counts, microbatch))
        if gradients is not None:
            summed: dict[str, float] = {}
            for theirs, _ in everyone:
                for name, n in theirs.items():
                    summed[name] = summed.get(name, 0.0) + n
            counts = summed
        bad = [(m, rank) for rank, (_, m) in enumerate(everyone) if m is not None]
        first, rank = min(bad) if bad else (None, None)
        return cls({name: max(1, round(n)) for name, n in counts.items()}, first, rank)

    @property
    def num_nonfinite(self) -> int:
        """All entries together."""
        return sum(self.parameters.values())

    def error(self, *, update: int) -> NonFiniteGradient:
        """Say what is not finite, where it came from, and that nothing was touched."""
        shown = list(self.parameters.items())
        named = ", ".join(f"`{name}` ({count:,})" for name, count in shown[:5])
        if len(shown) > 5:
            named += f" and {len(shown) - 5} more"
        whose = "" if self.rank is None else f" on rank {self.rank}"
        where = (
            f"microbatch {self.microbatch} of the window (from 0){whose} brought them"
            if self.microbatch is not None
            else "every loss was finite, so the microbatch does not show; run the window by "
            "`updater.update(window, loss)` or pass `every_microbatch=True` to the policy to find "
            "it"
        )
        error = NonFiniteGradient(
            f"Update {update}: {self.num_nonfinite:,} entries of the gradient are inf or nan, in "
            f"{named}; {where}. Weights, optimizer state and schedule are as they were. Look at "
            "that microbatch, lower the rate, or go on past it with "
            "`nonfinite=ms.Skip(max_consecutive=5)`.",
            parameters=self.parameters,
            microbatch=self.microbatch,
            update=update,
            rank=self.rank,
        )
        error.on_all_ranks = True  # what it says was gathered
        return error


def unread_error(
    names: Sequence[str], microbatch: int | None, *, norm: float, update: int, elsewhere: bool
) -> NonFiniteGradient:
    """Say what is known of a gradient that is not finite when it is gone already.

    Args:
        names: Of the parameters whose gradient has a norm that is not finite.
        microbatch: The first whose loss was not finite.
        norm: Of all gradients.
        update: Which attempt it was.
        elsewhere: Whether a microbatch of another rank had such a loss.
    """
    shown = ", ".join(f"`{name}`" for name in names[:5])
    if len(names) > 5:
        shown += f" and {len(names) - 5} more"
    fact = f"the gradient is inf or nan in {shown}"
    if not names:
        fact = f"the gradient has a norm of {norm:.3g}, for which the step has no factor in float32"
    where = (
        "every loss was finite, so the microbatch does not show; pass `lazy=False` to find it and "
        "to count the entries"
    )
    if microbatch is not None:
        where = f"microbatch {microbatch} of the window (from 0) brought it"
    elif elsewhere:
        where = "a microbatch of another rank brought it, whose error names it"
    return NonFiniteGradient(
        f"Update {update}: {fact}; {where}. It is told one update later, as this Updater is lazy: "
        "weights, optimizer state and schedule are as they were before it. Look at that "
        "microbatch, lower the rate, or go on past it with `nonfinite=ms.Skip(max_consecutive=5)`.",
        parameters=dict.fromkeys(names, 1),
        microbatch=microbatch,
        update=update,
    )


def empty_error(num_microbatches: int, *, update: int) -> EmptyWindow:
    """Say that a window holds nothing to take the mean over."""
    error = EmptyWindow(
        f"Update {update}: nothing was counted in {num_microbatches} microbatches, so the mean "
        "loss is 0/0. Leave fully masked batches out, count something else, or pass "
        "`empty=ms.Skip()`."
    )
    error.on_all_ranks = True  # the count is that of all
    return error


def no_gradient_error() -> WindowError:
    """Say that a backward reached no parameter the optimizer has."""
    return WindowError(
        "No parameter of the optimizer got a gradient, though a backward ran, so the step would do "
        "nothing. Check that the optimizer was made from this model's parameters and that they "
        "require gradients."
    )


def first_bad_microbatch(
    probe: Iterable[Any],
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    draws: Sequence[RandomState],
    ranks: Ranks | None,
) -> int | None:
    """Run a failed window's microbatches again, with the same draws, to find who broke it.

    Costs the window again and a read of the gradients a microbatch, on the way to an error.
    Buffers and random streams are as before afterwards; gradients are not. On several ranks each
    looks at its own microbatches, and all run all of theirs.

    Args:
        probe: The window again, cleared, looking after each backward.
        model: Whose buffers a forward may change.
        loss: The loss function of the window.
        draws: The random state before the forward of each microbatch, or of the first alone.
        ranks: The other ranks, which run theirs again, too.
    """
    window: Any = probe
    after, buffers = RandomState.capture_torch(), Buffers(model)
    try:
        with contextlib.nullcontext() if ranks is None else ranks.parallel.alone():
            for batch in window:
                if window.index < len(draws):
                    draws[window.index].restore()
                with window.forward():
                    value = loss(model, batch)
                window.backward(value)
                if ranks is None and window.first_nonfinite() is not None:
                    break
    finally:
        after.restore()
        buffers.restore()
    found: int | None = window.first_nonfinite()
    return found


def report_strangers(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Warn about trainable parameters that only one of model and optimizer has.

    Warns:
        UserWarning: They would never be stepped, or are stepped though the model does not use them.
    """
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    unstepped = [
        plain_name(name)
        for name, p in model.named_parameters()
        if p.requires_grad and id(p) not in stepped
    ]
    if unstepped:
        _warn(
            f"{len(unstepped)} trainable parameters of the model are not in the optimizer: "
            f"{_list(unstepped)}. They get gradients and are neither clipped nor stepped. Add "
            "them, set `requires_grad_(False)`, or give this Updater only the part it trains."
        )
    owned = {id(p) for p in model.parameters()}
    foreign = [
        f"shape {list(p.shape)}"
        for group in optimizer.param_groups
        for p in group["params"]
        if id(p) not in owned
    ]
    if foreign:
        _warn(
            f"{len(foreign)} parameters of the optimizer are not in the model: {_list(foreign)}. "
            "If the model was made again or moved after the optimizer was, the optimizer steps "
            "tensors that nobody uses. Make the optimizer from the present `model.parameters()`."
        )


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=4)  # whoever called `Updater(...)`


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def plain_name(name: str) -> str:
    """Take off a parameter's name what compiling and wrapping prepend."""
    return name.replace("_orig_mod.", "").removeprefix("module.")
