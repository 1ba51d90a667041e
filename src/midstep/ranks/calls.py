"""Calls: with what a model was called, so that a rank without a batch can take part in a forward.

Where each forward gathers shards, a rank that has run out of microbatches runs its last one again.
One that never had any is lent the arguments of another rank, call by call.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .world import World

__all__ = ["Call", "Calls"]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a module, and the autocast it ran in.

    Attributes:
        module: What was called.
        args: With what.
        kwargs: With what, by name.
        autocast: Its dtype; None where it was off.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None

    def run(self) -> Any:
        """Call it again."""
        device = next(self.module.parameters()).device.type
        context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.autocast is not None:
            context = torch.autocast(device, dtype=self.autocast)
        with context:
            return self.module(*self.args, **self.kwargs)


class Calls:
    """The calls of the last microbatch that this rank ran, or was lent.

    Calls count that come from outside: of the model, or of a part that is sharded by itself.

    Args:
        model: The model.
        roots: Its outermost sharded modules.
        world: Whom to lend to.

    Attributes:
        kept: The calls.
    """

    def __init__(self, model: nn.Module, roots: list[Any], world: World) -> None:
        self._world = world
        # What a compiled model calls inside is the compiler's affair.
        is_compiled = hasattr(model, "_orig_mod")
        self._modules: list[nn.Module] = list(dict.fromkeys([model, *roots * (not is_compiled)]))
        self.kept: list[Call] = []
        self._depth = 0
        self._is_recording = False
        self._lends = False
        for module in self._modules:
            # The hooks of FSDP2 come first and wait for all ranks; arguments must be lent before.
            module.register_forward_pre_hook(self._note, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._leave, always_call=True)

    def begin(self, *, lends: bool) -> None:
        """Begin a window, in which the first microbatch of each rank may be lent to others."""
        self._lends = lends

    def record(self) -> None:
        """Keep the calls that follow instead of those before."""
        self.kept = []
        self._depth = 0
        self._is_recording = True

    def end_record(self, *, failed: bool) -> None:
        """Leave later calls, such as those of an evaluation, alone."""
        self._is_recording = False
        if self._lends and not failed:
            self._lends = False
            self._exchange(None)

    def again(self) -> Iterator[Call]:
        """Give the calls of one microbatch to run once more: this rank's own, or lent ones."""
        if not self._lends:
            yield from self.kept
            return
        self._lends = False
        own, self.kept = self.kept, []
        while (call := self._exchange(None)) is not None:
            self.kept.append(call)
            # A rank that ran microbatches in earlier windows knows the call, but must be in step.
            yield own[len(self.kept) - 1] if len(own) >= len(self.kept) else call
        self.kept = own or self.kept

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_recording:
            return
        self._depth += 1
        if self._depth > 1:
            return
        device = next(module.parameters()).device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        call = Call(module, args, kwargs, dtype)
        self.kept.append(call)
        if self._lends:
            self._exchange(call)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_recording:
            self._depth -= 1

    def _exchange(self, call: Call | None) -> Call | None:
        """Lend one call to the ranks that need it; None ends a microbatch. All ranks take part."""
        said = None
        if call is not None:
            place = self._modules.index(call.module)
            said = (place, tree_map(_to_host, (call.args, call.kwargs)), call.autocast)
        heard = [other for other in self._world.gather_objects(said) if other is not None]
        if call is not None or not heard:
            return call
        place, (args, kwargs), autocast = heard[0]
        module = self._modules[place]
        device = next(module.parameters()).device
        args, kwargs = tree_map(lambda leaf: _to_device(leaf, device), (args, kwargs))
        return Call(module, args, kwargs, autocast)


def _to_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def _to_device(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf
