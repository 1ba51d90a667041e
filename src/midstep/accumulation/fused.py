"""Fused accumulation: a weight gradient is added to `.grad` by the product that makes it.

    .grad += grad_output.T @ input     in one call, not a product, a temporary and an addition

From the second microbatch of a window on, autograd makes each weight gradient anew, writes it to
memory and reads it again to add it. For few tokens and large weights that is most of the backward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ranks import Ranks

__all__ = ["Fused"]

# Below, the Python of a function of one's own costs more than a pass over the weight.
_NUM_ENTRIES = 2**16


class _Gate:
    """Whether the backward that runs may write to `.grad` by itself."""

    __slots__ = ("is_open",)

    def __init__(self) -> None:
        self.is_open = False


class Fused:
    """Have `nn.Linear` and `nn.Embedding` add their weight gradients straight into `.grad`.

    The same gradients up to the order of additions, and no temporary of a weight's size. Pays for
    few tokens a microbatch: the fewer, the more. Modules with a weight of at least `num_entries`
    entries are taken; their `forward` is replaced on the instance. A module falls back to plain
    autograd by itself, call by call: under autocast (the product is in another dtype than `.grad`),
    under `torch.compile` and `torch.func`, where the weight carries hooks, where a caller asks for
    gradients with `torch.autograd.grad`, and in the backward in which DDP reduces. Convolutions are
    left alone: their kernels have no way to add to what is there.

    Args:
        num_entries: The smallest weight that is taken.

    Raises (when an `Updater` takes it):
        ValueError: The model has no such module, is compiled, or is sharded by FSDP2 or tensor
            parallel.

    Example:
        >>> import midstep as ms
        >>> model = nn.Linear(256, 256)
        >>> updater = ms.Updater(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation=Fused())
        >>> batches = [torch.ones(2, 256), torch.ones(1, 256)]
        >>> record = updater.update(batches, lambda m, x: m(x).sum(), count=ms.rows())
        >>> model.weight.grad[0, 0]
        tensor(1.)
    """

    def __init__(self, num_entries: int = _NUM_ENTRIES) -> None:
        if isinstance(num_entries, bool) or not num_entries >= 0:
            raise ValueError(
                f"`Fused(num_entries={num_entries!r})`: must be a number of entries, 0 for every "
                "weight."
            )
        self.num_entries = num_entries
        self._gate = _Gate()
        self._modules: list[nn.Module] = []

    def __repr__(self) -> str:
        return f"Fused(num_entries={self.num_entries})"

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks | None
    ) -> None:
        """Replace the forward of every module that is taken."""
        if ranks is not None and ranks.parallel.is_split:
            raise ValueError(
                "`accumulation=Fused()` with a model that FSDP2 or tensor parallel splits: the "
                "whole gradient of a weight never lies in its `.grad`, so nothing can be added to "
                "it. Leave it out."
            )
        if any(hasattr(module, "_orig_mod") for module in model.modules()):
            raise ValueError(
                "`accumulation=Fused()` with a compiled model: the compiler decides itself what is "
                "fused, and would trace past this. Leave it out, or train the model uncompiled."
            )
        self._modules = [module for module in model.modules() if self._takes(module)]
        if not self._modules:
            raise ValueError(
                f"`accumulation={self!r}`: the model has no `nn.Linear` or dense `nn.Embedding` "
                f"with a weight of {self.num_entries:,} entries or more, so nothing would be "
                "fused. Leave it out."
            )
        for module in self._modules:
            call: Any = _linear if isinstance(module, nn.Linear) else _embedding
            # On the instance: the class, its hooks and its state stay what they are.
            module.forward = functools.partial(call, module, self._gate)

    def detach(self) -> None:
        """Give every module its own forward back."""
        for module in self._modules:
            vars(module).pop("forward", None)
        self._modules = []

    def begin(self) -> None:
        """Nothing: the first microbatch makes the gradients."""

    def before_backward(self, *, index: int, syncs: bool) -> None:
        """Open the gate, where no rank waits for what autograd would hand on."""
        self._gate.is_open = index > 0 and not syncs

    def after_backward(self) -> None:
        """Shut the gate."""
        self._gate.is_open = False

    def finish(self) -> None:
        """Nothing: everything is in `.grad`."""

    def forget(self) -> None:
        """Nothing is kept."""

    def _takes(self, module: nn.Module) -> bool:
        # Of exactly these classes: another one's forward may do anything.
        if type(module) is nn.Linear:
            return module.weight.numel() >= self.num_entries
        return (
            type(module) is nn.Embedding
            and module.weight.numel() >= self.num_entries
            and not (module.sparse or module.scale_grad_by_freq or module.max_norm is not None)
        )


def _is_plain(weight: Tensor) -> bool:
    """Whether a forward must be left to autograd."""
    return (
        not torch.is_grad_enabled()
        or not weight.requires_grad
        or not weight.is_leaf
        or torch.compiler.is_compiling()
        or torch.is_autocast_enabled(weight.device.type)
        or torch._C._are_functorch_transforms_active()  # noqa: SLF001 - torch has no other way
    )


def _linear(module: nn.Linear, gate: _Gate, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
    if _is_plain(module.weight):
        return F.linear(input, module.weight, module.bias)
    found: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        input, module.weight, module.bias, gate
    )
    return found


def _embedding(module: nn.Embedding, gate: _Gate, input: Tensor) -> Tensor:  # noqa: A002
    if _is_plain(module.weight):
        return F.embedding(input, module.weight, module.padding_idx)
    found: Tensor = _Embedding.apply(  # type: ignore[no-untyped-call]
        input, module.weight, module.padding_idx, gate
    )
    return found


def _adds(ctx: Any, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether this backward may add to `.grad` by itself, for nobody else sees it on its way."""
    grad = weight.grad
    if not ctx.gate.is_open or grad is None or torch.is_grad_enabled():
        return False
    if grad.dtype is not dtype or grad.layout is not torch.strided or grad.requires_grad:
        return False
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:  # noqa: SLF001
        return False
    try:  # False, or an error, where the caller asked for other gradients than those of all leaves
        will: bool = torch._C._will_engine_execute_node(ctx.next_functions[1][0])  # noqa: SLF001
    except RuntimeError:
        return False
    return will


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gate: _Gate) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gate = gate
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad @ weight if needs_x else None
        rows = grad.reshape(-1, grad.shape[-1])
        grad_weight = None
        if needs_weight:
            inputs = x.reshape(-1, x.shape[-1])
            if _adds(ctx, weight, rows.dtype):
                weight.grad.addmm_(rows.t(), inputs)
            else:
                grad_weight = rows.t() @ inputs
        grad_bias = rows.sum(0) if ctx.has_bias and needs_bias else None
        return grad_x, grad_weight, grad_bias, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, indices: Tensor, weight: Tensor, padding_idx: int | None, gate: _Gate
    ) -> Tensor:
        ctx.save_for_backward(indices, weight)
        ctx.gate = gate
        ctx.padding_idx = -1 if padding_idx is None else padding_idx
        return F.embedding(indices, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        indices, weight = ctx.saved_tensors
        padding = ctx.padding_idx
        if not _adds(ctx, weight, grad.dtype):
            made = torch.ops.aten.embedding_dense_backward(
                grad, indices, weight.shape[0], padding, False
            )
            return None, made, None, None
        if padding >= 0:
            grad = grad.masked_fill((indices == padding).unsqueeze(-1), 0.0)
        weight.grad.index_add_(0, indices.reshape(-1), grad.reshape(-1, grad.shape[-1]))
        return None, None, None, None
