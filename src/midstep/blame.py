"""Blame: which parameter, which microbatch, and what model and optimizer do not share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .errors import EmptyWindow, NonFiniteGradient, WindowError
from .snapshot import Buffers, RandomState

__all__ = [
    "empty_error",
    "first_bad_microbatch",
    "names_of",
    "no_gradient_error",
    "nonfinite_error",
    "plain_name",
    "report_strangers",
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


def nonfinite_error(
    parameters: Mapping[str, int], microbatch: int | None, *, update: int
) -> NonFiniteGradient:
    """Say what is not finite, where it came from, and that nothing was touched."""
    named = ", ".join(f"`{name}` ({count:,})" for name, count in list(parameters.items())[:5])
    if len(parameters) > 5:
        named += f" and {len(parameters) - 5} more"
    where = (
        f"microbatch {microbatch} of the window (from 0) brought them"
        if microbatch is not None
        else "every loss was finite, so the microbatch does not show; run the window by "
        "`updater.update(window, loss)` or pass `every_microbatch=True` to the policy to find it"
    )
    return NonFiniteGradient(
        f"Update {update}: {sum(parameters.values()):,} entries of the gradient are inf or nan, in "
        f"{named}; {where}. Weights, optimizer state and schedule are as they were. Look at that "
        "microbatch, lower the rate, or go on past it with `nonfinite=ms.Skip(max_consecutive=5)`.",
        parameters=parameters,
        microbatch=microbatch,
        update=update,
    )


def empty_error(num_microbatches: int, *, update: int) -> EmptyWindow:
    """Say that a window holds nothing to take the mean over."""
    return EmptyWindow(
        f"Update {update}: nothing was counted in {num_microbatches} microbatches, so the mean "
        "loss is 0/0. Leave fully masked batches out, count something else, or pass `empty=ms.Skip()`."
    )


def no_gradient_error() -> WindowError:
    """Say that a backward reached no parameter the optimizer has."""
    return WindowError(
        "No parameter of the optimizer got a gradient, though a backward ran, so the step would do "
        "nothing. Check that the optimizer was made from this model's parameters and that they "
        "require gradients."
    )


def first_bad_microbatch(
    probe: Iterable[Any], model: nn.Module, loss: Callable[[Any, Any], Any], random: RandomState
) -> int | None:
    """Run a failed window's microbatches again, with the same draws, to find who broke it.

    Costs the window again and a read of the gradients a microbatch, on the way to an error.
    Buffers and random streams are as before afterwards; gradients are not.

    Args:
        probe: The window again, cleared, looking after each backward.
        model: Whose buffers a forward may change.
        loss: The loss function of the window.
        random: The random state it began with.
    """
    window: Any = probe
    after, buffers = RandomState.capture_torch(), Buffers(model)
    random.restore()
    try:
        for batch in window:
            with window.forward():
                value = loss(model, batch)
            window.backward(value)
            if window.first_nonfinite() is not None:
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
