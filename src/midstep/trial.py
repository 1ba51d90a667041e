"""A trial: updates that leave no trace, for whoever has to run some in order to know something."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .cursor import Cursor
from .nonfinite import Policy
from .rates import Schedule, rates_of
from .snapshot import RandomState, generators
from .updater import Updater

__all__ = ["trial"]

# ruff: noqa: SLF001 - a trial is the updater's other half, and sees what the updater sees


@contextlib.contextmanager
def trial(
    updater: Updater,
    *loaders: Iterable[Any],
    nonfinite: Policy | None = None,
    schedule: Schedule | None = None,
) -> Iterator[Updater]:
    """Put everything back to the last bit when the block ends, however it ends.

    Weights, buffers, gradients and modes of the model; state and groups of the optimizer; loss
    scale, clip statistics, clocks and place in the data; python's, numpy's and torch's random
    streams, and those of the loaders. Inside, records reach no sink, no average of the weights is
    kept, and every verdict is read at once.

    Costs a copy of weights, buffers, gradients and optimizer state.

    Args:
        updater: With no window open.
        loaders: Whose generators are put back, and whose `state_dict` where they have one.
        nonfinite: A policy instead of the updater's own.
        schedule: A schedule instead of the updater's own; None leaves the rates as they are.

    Raises:
        WindowError: A window is open.

    Example:
        >>> import midstep as ms
        >>> model = nn.Linear(1, 1)
        >>> before = copy.deepcopy(model.state_dict())
        >>> updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=1.0))
        >>> with trial(updater):
        ...     record = updater.update(
        ...         [torch.ones(2, 1)], lambda m, x: m(x).sum(), count=ms.rows())
        >>> all(torch.equal(model.state_dict()[name], before[name]) for name in before)
        True
        >>> updater.clock.step
        0
    """
    state = copy.deepcopy(updater.state_dict())  # settles the last update
    del state["cursor"]  # to load it would be to resume: the next pass would begin in the middle
    kept: list[_Kept] = [_Model(updater.model), _Optimizer(updater.optimizer), _Loaders(loaders)]
    random = RandomState.capture()
    swapped: list[tuple[object, str, Any]] = [
        (updater, "nonfinite", updater.nonfinite if nonfinite is None else nonfinite),
        (updater, "averaged_model", None),
        (updater._books, "rates", updater._books.rates),
        (updater._books, "sinks", []),
        (updater._late, "is_on", False),
        (updater._feed, "cursor", Cursor()),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in swapped]
    try:
        for owner, name, value in swapped:
            setattr(owner, name, value)
        updater._books.rates = rates_of(updater.optimizer, schedule)
        yield updater
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        updater.load_state_dict(state)
        for part in kept:
            part.restore()
        random.restore()


class _Kept(Protocol):
    def restore(self) -> None: ...


class _Model:
    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._gradients = [(p, _grad_dtype(p), p.grad, _copy(p.grad)) for p in model.parameters()]
        self._modes = [(module, module.training) for module in model.modules()]

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, kept in self._tensors:
            tensor.copy_(kept)
        for parameter, dtype, gradient, kept in self._gradients:
            if dtype is not _grad_dtype(parameter):  # a window was begun and not stepped
                parameter.grad = None
                parameter.grad_dtype = dtype
            parameter.grad = gradient
            if gradient is not None:
                gradient.copy_(kept)
        for module, mode in self._modes:
            module.training = mode


class _Optimizer:
    """Kept by hand: `load_state_dict` would cast state to the dtype of its parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = [
            (parameter, [(name, value, _copy(value)) for name, value in state.items()])
            for parameter, state in optimizer.state.items()
        ]
        self._groups = [
            [(name, value, _copy(value)) for name, value in group.items() if name != "params"]
            for group in optimizer.param_groups
        ]

    @torch.no_grad()
    def restore(self) -> None:
        self._optimizer.state.clear()
        for parameter, state in self._state:
            _put_back(self._optimizer.state[parameter], state)
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name in group.keys() - {name for name, _, _ in kept} - {"params"}:
                del group[name]
            _put_back(group, kept)


class _Loaders:
    def __init__(self, loaders: Iterable[Any]) -> None:
        self._generators = [
            (generator, generator.get_state())
            for loader in loaders
            for generator in generators(loader)
        ]
        self._stateful = [
            (loader, copy.deepcopy(loader.state_dict()))
            for loader in loaders
            if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        ]

    def restore(self) -> None:
        for loader, state in self._stateful:
            loader.load_state_dict(state)
        for generator, state in self._generators:
            generator.set_state(state)


def _grad_dtype(parameter: Tensor) -> torch.dtype | None:
    """In what a parameter's gradient is summed; None where this version of torch has no choice."""
    return getattr(parameter, "grad_dtype", None)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _put_back(into: Any, kept: Iterable[tuple[str, Any, Any]]) -> None:
    """Give the same tensors their old values, so that whoever holds one sees them."""
    for name, value, copied in kept:
        into[name] = value.copy_(copied) if isinstance(value, Tensor) else copied
