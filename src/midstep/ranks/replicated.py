"""DDP: every rank has the whole model, and gradients are averaged in buckets during a backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["DataParallel"]


class DataParallel:
    """DistributedDataParallel, reducing once a window.

    Raises:
        NotImplementedError: `static_graph=True`, or over tensor parallel, neither of which torch
            makes work.
    """

    is_lockstep = False
    needs_calls = False

    def __init__(self, model: DistributedDataParallel) -> None:
        if model.static_graph:
            raise NotImplementedError(
                "`Updater`: DDP with `static_graph=True` cannot leave out a reduction (torch 2.13 "
                "fails an internal assertion on the second microbatch), so a window of several "
                "would reduce every one. Leave `static_graph` out."
            )
        if any(hasattr(p, "_st_info") for p in model.parameters()):
            raise NotImplementedError(
                "`Updater`: DDP over a tensor-parallel model. torch 2.13 makes the split "
                "parameters anew in every forward, so the optimizer steps tensors that the model "
                "no longer has. Use `fully_shard` on the data-parallel axis of the mesh."
            )
        self._model = model
        self.data_parallel_size = dist.get_world_size(model.process_group)
        self.seed_factor = float(self.data_parallel_size)  # DDP divides by as much
        ignored = set(model.parameters_to_ignore)
        names = model.module.named_parameters()
        self._own = {parameter for name, parameter in names if name in ignored}
        self._is_synced = False
        self._is_armed = False  # the reducer waits for every parameter of a forward
        self._is_alone = False
        model.register_forward_pre_hook(self._note_forward)

    def begin(self, num_microbatches: int, *, lends: bool, syncs_late: bool) -> None:
        """Start a window whose gradients are not added up yet."""
        self._is_synced = False
        self._is_armed = False

    def before_forward(self, *, index: int, is_last: bool) -> None:
        """Have DDP reduce in the backward of this microbatch, or not; it asks in the forward."""
        self._model.require_backward_grad_sync = is_last and not self._is_alone

    def after_forward(self, *, failed: bool) -> None:
        """Leave DDP as it was found."""
        self._model.require_backward_grad_sync = True

    def after_backward(self) -> None:
        """Note that DDP has reduced, if the forward went through it."""
        self._is_synced = self._is_armed

    def finish(self) -> None:
        """Reduce with zeros, on a rank whose last microbatch had nothing to reduce."""
        if self._is_synced:
            return
        self._is_synced = True
        if self._is_armed and self._model.find_unused_parameters:
            # It has noted what the forward left unused, which must not be touched now.
            self._reset()
        nothing = self._nothing()
        if not self._is_armed:
            nothing = self._through_ddp(nothing)
        nothing.backward(torch.zeros_like(nothing))  # type: ignore[no-untyped-call]

    def forget_calls(self) -> None:
        """None is run again."""

    def discard(self) -> None:
        """Have the reducer wait for nothing more. On all ranks alike, as buckets are made anew."""
        self._reset()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Run forwards and backwards in which DDP neither reduces nor broadcasts buffers."""
        before = self._model.require_forward_param_sync
        self._is_alone, self._model.require_forward_param_sync = True, False
        try:
            yield
        finally:
            self._is_alone, self._model.require_forward_param_sync = False, before

    def hidden_gradients(self) -> Sequence[Tensor]:
        """Nothing lies elsewhere."""
        return ()

    def is_own(self, parameter: Tensor) -> bool:
        """Those DDP was told to ignore, such as a rank's experts."""
        return parameter in self._own

    def _note_forward(self, module: nn.Module, args: Any) -> None:
        if self._model.require_backward_grad_sync and torch.is_grad_enabled():
            self._is_armed = True

    def _nothing(self) -> Tensor:
        """Give 0 as a function of the parameters that DDP reduces.

        Where DDP looks for unused parameters it reduces those that no rank has used, too, if one is
        in here; so then it is one alone, that was used if any was.
        """
        parameters = [
            p for p in self._model.module.parameters() if p.requires_grad and p not in self._own
        ]
        if self._model.find_unused_parameters:
            used = [p for p in parameters if p.grad is not None]
            parameters = (used or parameters)[:1]
        return sum((p.flatten()[:1].sum() * 0.0 for p in parameters), torch.zeros(()))

    def _reset(self) -> None:
        self._is_armed = False
        self._model.reducer._reset_state()  # noqa: SLF001 - torch has no other way

    def _through_ddp(self, nothing: Tensor) -> Tensor:
        """Arm the reducer, which DDP does in its own forward alone, without running the model.

        The model's forward would want a batch, draw random numbers and run hooks.
        """
        model: Any = self._model
        model._run_ddp_forward = lambda: nothing  # noqa: SLF001 - torch has no other way
        try:
            armed: Tensor = model.forward()
        finally:
            del model._run_ddp_forward  # noqa: SLF001 - the class has its own
        return armed
