"""FSDP2: parameters, gradients and optimizer state in shards; forward and backward gather them.

Every forward and backward is a collective of all ranks, so ranks that hold fewer microbatches run
the last one again with a seed of 0 until all have run equally many.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ..errors import WindowError
from ..snapshot import Buffers, RandomState
from .calls import Call, Calls
from .fsdp import fsdp_groups, reset, roots_of
from .unsharded import Unsharded
from .world import World

__all__ = ["FullySharded", "Sharding"]


@dataclasses.dataclass(frozen=True, slots=True)
class Sharding:
    """What FSDP2 trades inside a window: memory for traffic.

    Attributes:
        reduce_every_microbatch: Reduce and scatter after each microbatch instead of once a window.
            Holds gradients in shards all along (saves one full gradient of memory on every rank)
            for a reduce-scatter a microbatch.
        keep_gathered: Keep the parameters whole between the microbatches of a window. Saves the
            all-gathers of all microbatches but the first, for one full copy of the parameters on
            every rank.

    Example:
        >>> Sharding()
        Sharding(reduce_every_microbatch=False, keep_gathered=False)
    """

    reduce_every_microbatch: bool = False
    keep_gathered: bool = False


class FullySharded:
    """FSDP2 on a mesh of one axis (shard) or two (replicate, shard), tensor parallel or not.

    Args:
        model: The whole of it.
        modules: Every module `fully_shard` was applied to.
        sharding: What to trade.
        world: The ranks.
    """

    seed_factor = 1.0
    is_lockstep = True
    runs_alone = False
    is_split = True

    def __init__(
        self, model: nn.Module, modules: Sequence[FSDPModule], sharding: Sharding, world: World
    ) -> None:
        self._model = model
        self._modules = modules
        self._roots = roots_of(modules)
        self._sharding = sharding
        widest = max(fsdp_groups(modules), key=lambda group: group.data_parallel_size)
        groups = widest.process_groups
        self.data_parallel_size = widest.data_parallel_size
        for module in modules:
            # Sums over the ranks, not means; gloo and some NCCL versions have no scaled sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self._unsharded = Unsharded(model, modules, groups, world)
        # Added up over some of the ranks that see different data, so others must hold another one.
        self._narrow = {
            p
            for group in fsdp_groups(modules)
            if group.data_parallel_size < self.data_parallel_size
            for p in group.sharded
        }
        self._calls = Calls(model, self._roots, world)
        self._num_run = 0
        self._num_microbatches = 0
        self._is_alone = False
        self._is_synced = False

    @property
    def needs_calls(self) -> bool:
        """Whether this rank has run no forward yet that it could run again."""
        return not self._calls.kept

    def widen(self) -> Iterable[torch.dtype]:
        """Its own sums are in the dtype it reduces in; on shards in that of the parameters."""
        found = {dtype for group in fsdp_groups(self._modules) for dtype in group.reduces_in}
        if self._sharding.reduce_every_microbatch:
            found |= {p.dtype for group in fsdp_groups(self._modules) for p in group.sharded}
        return found

    def begin(
        self, num_microbatches: int, *, lends: bool, syncs_late: bool, reruns: bool = False
    ) -> None:
        """Start a window of so many forwards and backwards on every rank."""
        self._num_run = 0
        self._num_microbatches = num_microbatches
        self._calls.begin(lends=lends)
        self._is_synced = False

    def begin_again(self) -> None:
        """No rank can: its forwards are collectives."""
        raise AssertionError("a sharded window is not run again")

    def before_forward(self, *, index: int, is_last: bool) -> None:
        """Reduce and reshard in this backward, or later."""
        self._num_run = index + 1
        self._set()
        self._calls.record()

    def after_forward(self, *, failed: bool) -> None:
        """Keep what was called; the flags are asked in backward, too."""
        self._calls.end_record(failed=failed)

    def after_backward(self) -> None:
        """Nothing to note: how many have run says it."""

    def finish(self) -> None:
        """Run the missing forwards and backwards with a seed of 0, then add up plain parameters."""
        self._run_missing()
        if not self._is_synced:
            self._is_synced = True
            self._unsharded.add_up()

    def claims(self) -> list[float]:
        """Nothing to claim."""
        return []

    def settle(self, sums: Sequence[float]) -> None:
        """Nothing is open."""

    def forget_calls(self) -> None:
        """Run none of the last forwards again: 0 times what is not finite would not be 0."""
        self._calls.kept = []

    def discard(self) -> None:
        """Forget gradients that were never reduced, and parameters that were left whole."""
        reset(self._roots)
        for group in fsdp_groups(self._modules):
            group.forget()
        for module in self._modules:
            module.reshard()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Run as many forwards and backwards as the window has on the fullest rank; reduce none."""
        self._num_run = 0
        self._is_alone = True
        try:
            yield
            self._run_missing()
        finally:
            self._is_alone = False
            self.discard()

    def hidden_gradients(self) -> Sequence[Tensor]:
        """The whole gradients of this rank's own microbatches, which FSDP2 keeps to itself."""
        return [t for group in fsdp_groups(self._modules) for t in group.hidden_gradients()]

    def is_own(self, parameter: Tensor) -> bool:
        """Those only some ranks have, such as their experts: sharded among them, or left alone."""
        return parameter in self._narrow or self._unsharded.is_own(parameter)

    def _set(self) -> None:
        is_last = self._num_run == self._num_microbatches and not self._is_alone
        reduces = (is_last or self._sharding.reduce_every_microbatch) and not self._is_alone
        keeps = self._sharding.keep_gathered
        for module in self._modules:
            module.set_requires_gradient_sync(reduces, recurse=False)
            module.set_requires_all_reduce(is_last, recurse=False)
            module.set_is_last_backward(is_last)
            if keeps:
                module.set_reshard_after_forward(False, recurse=False)
                module.set_reshard_after_backward(is_last, recurse=False)

    def _run_missing(self) -> None:
        if self._num_run >= self._num_microbatches:
            return
        after, buffers = RandomState.capture_torch(), Buffers(self._model)
        while self._num_run < self._num_microbatches:
            self._num_run += 1
            self._set()
            nothing: Tensor | None = None
            for call in self._calls.again():
                part = _zero_of(call)
                nothing = part if nothing is None else nothing + part
            assert nothing is not None  # the other ranks have run at least one forward
            nothing.backward(torch.zeros_like(nothing))  # type: ignore[no-untyped-call]
        after.restore()
        buffers.restore()


def _zero_of(call: Call) -> Tensor:
    """Run a forward and give 0 as a function of everything it returned."""
    sums = [
        leaf.sum() * 0.0
        for leaf in tree_leaves(call.run())
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not sums:
        raise WindowError(
            f"A `{type(call.module).__name__}` returned no tensor with a graph, so a rank without "
            "a microbatch cannot take part in its backward. Return tensors, or a nesting that "
            "`torch.utils._pytree` knows."
        )
    whole = [s.full_tensor() if isinstance(s, DTensor) else s for s in sums]
    return torch.stack([s.float() for s in whole]).sum()
