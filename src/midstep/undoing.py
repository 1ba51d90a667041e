"""Undoing: a step of an optimizer that is broken off is finished, taken back, or told as broken.

A step changes weights and moments one after the other. When memory runs out within it, what is free
is given back and the step is gone through again, without the writes it had made; that needs no
copy. With copies it is taken back as a whole. What can be neither is an error, never half a step:
that of an optimizer whose kernels torch does not see, or that reads what it has changed.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .arithmetic import show_bytes
from .autorows import is_out_of_memory
from .errors import OutOfMemory
from .redoing import Redo, Unsound, Written, key_of
from .snapshot import RandomState

__all__ = ["StepGuard", "first_line", "give_back", "insist"]

_MOST_TRIES = 3


class StepGuard:
    """Takes one step of an optimizer, through errors of memory where that can be done.

    Costs, where nothing fails, a list of what the step may write to, and for optimizers that torch
    runs in grouped kernels a few microseconds an operation.

    Args:
        copies: Whether to copy weights and state before it: the memory of both, and a pass.
        before: Called before the step begins; its errors are the caller's.

    Attributes:
        is_begun: Whether weights or state may be changed.
    """

    def __init__(self, *, copies: bool, before: Callable[[], None]) -> None:
        self._copies = copies
        self._before = before
        self.is_begun = False

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Step, and where memory runs out finish the step, or take it back and begin it again.

        Args:
            optimizer: Whose gradients are ready.

        Raises:
            OutOfMemory: Some weights or moments are changed and others are not.

        Warns:
            UserWarning: The step ran out of memory and was finished.
        """
        was = self._noted(optimizer)
        self._before()
        self.is_begun = True
        mode: Written | Redo | None = was.watch()
        first = ""
        for num_left in reversed(range(_MOST_TRIES)):
            failure = _failure_of(optimizer, mode)
            if failure is None:
                break
            if not is_out_of_memory(failure) and not isinstance(failure, Unsound):
                raise failure
            written = was.written(mode)
            if written is None or isinstance(failure, Unsound):
                raise _broken(first or first_line(failure), was) from failure
            first = first or first_line(failure)
            failure = failure.with_traceback(None)  # whose frames hold what the step had made
            give_back()
            insist(was.restore)
            if not num_left:
                if any(written.values()):
                    raise _broken(first, was) from failure
                self.is_begun = False
                raise failure
            mode = was.watch() if was.is_copied else Redo(written)
        if first:
            _tell(first)

    def _noted(self, optimizer: torch.optim.Optimizer) -> _Before:
        if self._copies or not _makes_state(optimizer):
            return _Before(optimizer, copies=self._copies)
        try:
            return _Before(optimizer, copies=True)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        give_back()
        return _Before(optimizer, copies=False)  # the step may need less than the copy did


class _Before:
    """What a step begins from: enough to know what it has written, and to begin it again.

    Attributes:
        is_copied: Whether weights and state are taken back, not only what names them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, copies: bool) -> None:
        self._optimizer = optimizer
        self._draws = RandomState.capture_torch()
        groups = optimizer.param_groups
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        self._states = {p: _shallow(state) for p, state in optimizer.state.items()}
        self._parameters = [p for group in groups for p in group["params"]]
        self._gradients = [p.grad for p in self._parameters]
        self.is_copied = copies
        self._copies = [(t, t.detach().clone()) for t in self._held()] if copies else []
        self._versions: list[tuple[Tensor, int]] = []
        self._counts_itself = not copies and _is_a_loop(optimizer)
        if self._counts_itself:
            self._versions = [(t, t._version) for t in self._known()]  # noqa: SLF001 - autograd relies on it

    @property
    def num_bytes(self) -> int:
        """Of weights and state, which a copy would take."""
        return sum(t.nbytes for t in self._held())

    def watch(self) -> Written | None:
        """Give what counts the writes of the step; None where the tensors do so themselves."""
        return None if self.is_copied or self._counts_itself else Written()

    def written(self, mode: Written | Redo | None) -> Mapping[int, int] | None:
        """Say how often each memory was written to; None where that cannot be known."""
        if self.is_copied:
            return {}
        if not _is_seen_through(self._optimizer) or (mode is not None and mode.is_torn):
            return None
        if mode is not None:
            return {key_of(t): mode.num.get(key_of(t), 0) for t in self._known()}
        found = {key_of(t): t._version - version for t, version in self._versions}  # noqa: SLF001
        return found if len(found) == len(self._versions) else None

    def _held(self) -> list[Tensor]:
        return [*self._parameters, *_tensors(list(self._states.values()))]

    def _known(self) -> list[Tensor]:
        """List, each once, what is there before the step and may be written in it."""
        known = [*self._held(), *_tensors(self._groups), *_tensors(self._gradients)]
        return list({id(tensor): tensor for tensor in known}.values())

    def restore(self) -> None:
        """Put back all that can be, so that the step may begin again."""
        with torch.no_grad():
            for tensor, copy in self._copies:
                tensor.copy_(copy)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(before)
        state = self._optimizer.state
        for key in list(state):
            if key not in self._states:
                del state[key]  # made by the broken step, maybe not all of it
        for key, before in self._states.items():
            state[key] = before if not isinstance(before, dict) else dict(before)
        self._draws.restore()


def give_back() -> None:
    """Give back to the device what nothing holds any more."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def insist(action: Callable[[], object]) -> None:
    """Do what may be done twice, through one error of memory more.

    Args:
        action: Puts something back.
    """
    try:
        action()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        action()


def first_line(error: BaseException) -> str:
    """Shorten an error to its first line.

    Args:
        error: Of any kind.
    """
    return str(error).partition("\n")[0] or type(error).__name__


def _failure_of(
    optimizer: torch.optim.Optimizer, mode: Written | Redo | None
) -> BaseException | None:
    try:
        with contextlib.nullcontext() if mode is None else mode:
            optimizer.step()
        if isinstance(mode, Redo):
            mode.check(_tensors([dict(optimizer.state), optimizer.param_groups]))
    except Exception as error:  # noqa: BLE001 - the caller judges it
        if isinstance(mode, Redo) and not is_out_of_memory(error):
            return Unsound(first_line(error)).with_traceback(error.__traceback__)
        return error
    return None


def _tell(failure: str) -> None:
    warnings.warn(
        f"Out of memory in the optimizer's step ({failure}). What nobody holds any more was given "
        "back, and the step was finished: each weight is stepped once. `fused=True` needs no "
        "memory in it.",
        UserWarning,
        stacklevel=3,
    )


def _broken(failure: str, was: _Before) -> OutOfMemory:
    return OutOfMemory(
        f"Out of memory in the middle of an optimizer step ({failure}), which could "
        "not be finished: some weights or moments are changed and others are not, and there is no "
        "copy to go back to. Load the last checkpoint. `ms.AutoRows(guards_step=True)` keeps a "
        f"copy in each step, of {show_bytes(was.num_bytes)} here; an optimizer with `fused=True` "
        "takes no memory in its step."
    )


def _is_seen_through(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all that its step writes is written by torch's own operations."""
    kinds = set(type(optimizer).__mro__) - {torch.optim.Optimizer, object}
    return any(_is_torchs_own(kind) for kind in kinds)


def _is_torchs_own(kind: type) -> bool:
    return f"{kind.__module__}.".startswith("torch.optim.")


def _is_a_loop(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step takes one tensor at a time, so that each counts its writes itself."""
    if not _is_torchs_own(type(optimizer)):
        return False
    for group in optimizer.param_groups:
        is_on_host = all(p.is_cpu for p in group["params"])
        if group.get("fused") or group.get("foreach") or not is_on_host:
            return False
    return True


def _makes_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this step makes state, as the first one does: made again, it would be another."""
    groups = optimizer.param_groups
    if isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in groups):
        return False
    parameters = [p for group in groups for p in group["params"] if p.grad is not None]
    return any(p not in optimizer.state for p in parameters)


def _shallow(state: Any) -> Any:
    return dict(state) if isinstance(state, dict) else state


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if values is None or isinstance(values, (bool, int, float, str)):
        return []
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return [tensor for value in values for tensor in _tensors(value)]
