"""Wide accumulation: the sum of a window in float32, for parameters in half precision.

    .grad (float32) += grad(loss_sum) * seed;   once, at the step:  .grad = round(factor * .grad)

1,000 additions of 1.0 to a bfloat16 `.grad` stall at 256. Here every microbatch is added in float32
and the sum is rounded once, clip coefficient and all.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ranks import Ranks

__all__ = ["Wide"]

_HALF = (torch.float16, torch.bfloat16)


class Wide:
    """Add up the gradients of bfloat16 and float16 parameters in float32; others are left alone.

    4 bytes a parameter while the window runs, 2 after the step, when `.grad` holds the true clipped
    gradient in the parameter's dtype. The step takes one pass more, tensor by tensor; the norm is
    that of the float32 sums and costs less than one in bfloat16.

    Under FSDP2 the sums are its own, in the dtype it reduces in, so
    `MixedPrecisionPolicy(reduce_dtype=torch.float32)` is asked for and nothing else is done. DDP's
    buckets are in the dtype of the parameters, so the float32 sums are added up over the ranks once
    the last backward is over: twice the bytes, and no overlap.

    Raises (when an `Updater` takes it):
        ValueError: No parameter is in half precision, or FSDP2 reduces in half precision.
        NotImplementedError: This version of torch has no `Tensor.grad_dtype`.

    Example:
        >>> import midstep as ms
        >>> model = torch.nn.Linear(1, 1, bias=False).bfloat16()
        >>> updater = ms.Updater(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.0), accumulation=Wide())
        >>> ones = [torch.ones(1, 1, dtype=torch.bfloat16)] * 1000
        >>> record = updater.update(ones, lambda m, x: m(x).float().sum(), count=lambda x: 1)
        >>> model.weight.grad
        tensor([[1.]], dtype=torch.bfloat16)
    """

    def __init__(self) -> None:
        self._optimizer: torch.optim.Optimizer | None = None

    def __repr__(self) -> str:
        return "Wide()"

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks | None
    ) -> None:
        """Take charge of every parameter of the optimizer that is in half precision."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(p.dtype in _HALF for p in parameters):
            raise ValueError(
                "`accumulation=Wide()`: no parameter is in bfloat16 or float16, so every sum is "
                "wide already. Leave it out; under autocast the parameters are in float32."
            )
        if not hasattr(torch.Tensor, "grad_dtype"):
            raise NotImplementedError(
                f"`accumulation=Wide()` with torch {torch.__version__}: it needs "
                "`Tensor.grad_dtype`, as torch 2.13 has it."
            )
        if ranks is not None:
            narrow = sorted(str(d) for d in ranks.parallel.widen() if d in _HALF)
            if narrow:
                raise ValueError(
                    f"`accumulation=Wide()`: the ranks add up gradients in {', '.join(narrow)}, "
                    "which would round them again. Pass `MixedPrecisionPolicy("
                    "reduce_dtype=torch.float32)` to `fully_shard`, and leave out "
                    "`Sharding(reduce_every_microbatch=True)`."
                )
        if ranks is None or not ranks.parallel.is_split:
            self._optimizer = optimizer

    def begin(self) -> None:
        """Have autograd add in float32; the step has left each gradient in its own dtype."""
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.dtype in _HALF:
                    _set_grad_dtype(parameter, torch.float32)

    def before_backward(self, *, index: int, syncs: bool) -> None:
        """Nothing: autograd knows what to do."""

    def after_backward(self) -> None:
        """Nothing."""


def _set_grad_dtype(parameter: Tensor, dtype: torch.dtype) -> None:
    parameter.grad_dtype = dtype
