"""DDP: every rank has the whole model, and gradients are averaged in buckets during a backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .world import World

__all__ = ["DataParallel"]


class DataParallel:
    """DistributedDataParallel, reducing once a window.

    Raises:
        NotImplementedError: `static_graph=True`, or over tensor parallel, neither of which torch
            makes work.
    """

    is_lockstep = False
    needs_calls = False
    is_split = False

    def __init__(self, model: DistributedDataParallel, world: World) -> None:
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
        self._world = world
        self.data_parallel_size = dist.get_world_size(model.process_group)
        ignored = set(model.parameters_to_ignore)
        names = model.module.named_parameters()
        self._own = {parameter for name, parameter in names if name in ignored}
        self._sparse = {
            module.weight
            for module in model.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        }
        self._trained = [
            p for p in model.module.parameters() if p.requires_grad and p not in self._own
        ]
        self._is_synced = False
        self._is_armed = False  # the reducer waits for every parameter of a forward
        self._is_alone = False
        self._is_wide = False  # gradients are wider than DDP's own buckets
        self._reruns = False  # this window may be run again, so its backwards need no other rank
        self._stand_in = self._trained[:1] if model.find_unused_parameters else []
        self._is_standing_in = False
        self._is_stand_in_used = False
        for parameter in self._stand_in:
            parameter.register_post_accumulate_grad_hook(self._note_used)
        model.register_forward_pre_hook(self._note_forward)

    @property
    def seed_factor(self) -> float:
        """How many ranks DDP divides by; 1 where it does not reduce."""
        return 1.0 if self._adds_up else float(self.data_parallel_size)

    @property
    def runs_alone(self) -> bool:
        """Whether no layer talks in its forward."""
        return not any(isinstance(m, nn.SyncBatchNorm) for m in self._model.modules())

    @property
    def _adds_up(self) -> bool:
        return self._is_wide or self._reruns

    def widen(self) -> Iterable[torch.dtype]:
        """Reduce after the last backward, in the dtype of each sum: DDP's buckets are too narrow.

        Costs what DDP hides behind that backward.
        """
        self._is_wide = True
        self._stand_in = []
        return ()

    def begin(
        self, num_microbatches: int, *, lends: bool, syncs_late: bool, reruns: bool = False
    ) -> None:
        """Start a window whose gradients are not added up yet."""
        self._reruns = reruns
        if reruns:
            self._talk_now()
        self._is_synced = False
        self._is_armed = False
        self._is_stand_in_used = False

    def begin_again(self) -> None:
        """Have the gradients of this rank added up once more."""
        self._is_synced = False

    def before_forward(self, *, index: int, is_last: bool) -> None:
        """Have DDP reduce in the backward of this microbatch, or not; it asks in the forward."""
        syncs = is_last and not self._is_alone and not self._adds_up
        self._model.require_backward_grad_sync = syncs
        if self._reruns:
            self._model.require_forward_param_sync = False

    def after_forward(self, *, failed: bool) -> None:
        """Leave DDP as it was found."""
        self._model.require_backward_grad_sync = True
        if self._reruns:
            self._model.require_forward_param_sync = True

    def after_backward(self) -> None:
        """Note that DDP has reduced, if the forward went through it."""
        self._is_synced = self._is_armed

    def finish(self) -> None:
        """Reduce with zeros, on a rank whose last microbatch had nothing to reduce."""
        if self._is_synced:
            return
        self._is_synced = True
        if self._adds_up:
            self._add_up()
            return
        if self._is_armed and self._model.find_unused_parameters:
            # It has noted what the forward left unused, which must not be touched now.
            self._reset()
        nothing = self._nothing()
        if not self._is_armed:
            nothing = self._through_ddp(nothing)
        nothing.backward(torch.zeros_like(nothing))  # type: ignore[no-untyped-call]
        self._is_standing_in = False

    def claims(self) -> list[float]:
        """Say whether a batch of this rank has used the parameter that stands in for a batch."""
        return [float(self._is_stand_in_used)] if self._stand_in else []

    def settle(self, sums: Sequence[float]) -> None:
        """Take its gradient from a parameter that no batch of any rank has used."""
        for parameter, num_used in zip(self._stand_in, sums, strict=True):
            if not num_used:
                parameter.grad = None

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

    def _talk_now(self) -> None:
        """Do what DDP would in a forward, where a rank that runs it again would do it twice."""
        model: Any = self._model
        model.reducer._rebuild_buckets()  # noqa: SLF001 - torch has no other way
        if model.will_sync_module_buffers():
            model._sync_buffers()  # noqa: SLF001 - torch has no other way

    @torch.no_grad()
    def _add_up(self) -> None:
        """Sum each gradient over the ranks; one that no rank has stays None."""
        group = self._model.process_group
        parameters = [p for p in self._trained if p.requires_grad]
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
        has = has.to(parameters[0].device)
        self._world.agree()
        with self._world.inside():
            dist.all_reduce(has, group=group)
        for parameter, number in zip(parameters, has.tolist(), strict=True):
            if number and parameter.grad is None:
                dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
                parameter.grad = torch.zeros_like(parameter, dtype=dtype)
        if any(0 < number < self.data_parallel_size for number in has.tolist()):
            self._world.agree()  # that every rank had the memory for its zeros
        with self._world.inside():
            handles = [
                dist.all_reduce(p.grad, group=group, async_op=True)
                for p in parameters
                if p.grad is not None
            ]
            for handle in handles:
                handle.wait()

    def _note_used(self, parameter: Tensor) -> None:
        self._is_stand_in_used = self._is_stand_in_used or not self._is_standing_in

    def _note_forward(self, module: nn.Module, args: Any) -> None:
        if self._model.require_backward_grad_sync and torch.is_grad_enabled():
            self._is_armed = True

    def _nothing(self) -> Tensor:
        """Give 0 as a function of the parameters that DDP reduces.

        Where DDP looks for unused parameters it gives a gradient to all that are in here, so that
        it is one alone. Should no rank have used that one, it loses it again in `settle`.
        """
        parameters = [p for p in self._trained if p.requires_grad]
        if self._model.find_unused_parameters:
            used = [p for p in parameters if p.grad is not None]
            parameters = (used or self._stand_in or parameters)[:1]
        zero = torch.zeros((), device=parameters[0].device)
        self._is_standing_in = True
        return sum((self._touched(p) for p in parameters), zero) * 0.0

    def _touched(self, parameter: Tensor) -> Tensor:
        if parameter not in self._sparse:
            return parameter.flatten()[:1].sum()
        first = torch.zeros((1,), dtype=torch.int64, device=parameter.device)
        return nn.functional.embedding(first, parameter, sparse=True).sum()

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
