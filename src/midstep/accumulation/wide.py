"""Wide accumulation: sums of a window with more digits than autograd's own.

    half:     .grad (float32) += grad(loss_sum) * seed;   once, at the step:  .grad = round(.grad)
    float32:  .grad += grad(loss_sum) * seed, and what that rounds off is kept;   once: added back

1,000 additions of 1.0 to a bfloat16 `.grad` stall at 256. Here every microbatch is added in float32
and the sum is rounded once, clip coefficient and all. A float32 `.grad` loses a digit or two over
as many microbatches, all of them where large gradients cancel; `compensated=True` keeps them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ranks import Ranks
from .rests import Rests

__all__ = ["Wide"]

_HALF = (torch.float16, torch.bfloat16)
_WHOLE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class Wide:
    """Add up the gradients of bfloat16 and float16 parameters in float32, and of others exactly.

    In half precision: 4 bytes a parameter while the window runs, 2 after the step, when `.grad`
    holds the true clipped gradient in the parameter's dtype. The step takes one pass more, tensor
    by tensor; the norm is that of the float32 sums and costs less than one in bfloat16.

    `compensated=True` is for parameters in float32 and float64, which are left alone otherwise.
    What each addition to `.grad` rounds off is kept beside it and added back once, before the norm:

        |error| <= u |sum| + O(n^2 u^2) sum_i |g_i|,   n microbatches, u = 2^-24 in float32

    It takes as many bytes again as `.grad`, 4 a float32 parameter, from the second microbatch of a
    window until its end, two blocks of 2^18 entries, and seven passes in cache for each gradient
    that is added; nothing is read by the host. Parameters in half precision keep their float32 sums
    as they are: rests would make 8 bytes of these, for digits that the one rounding drops. What a
    single backward adds up in itself (rows, uses of a tied weight) is as exact as torch makes it.

    Under FSDP2 the sums are its own, in the dtype it reduces in, so
    `MixedPrecisionPolicy(reduce_dtype=torch.float32)` is asked for and nothing else is done. DDP's
    buckets are in the dtype of the parameters, so the float32 sums are added up over the ranks once
    the last backward is over: twice the bytes, and no overlap. Rests of float32 parameters are
    added back inside the backward in which DDP reduces, tensor by tensor before it takes them: one
    rounding on each rank, no further traffic, and all of the overlap.

    Args:
        compensated: Keep what additions to float32 and float64 gradients round off.

    Raises (when an `Updater` takes it):
        ValueError: No parameter is in half precision, or with `compensated` all are; FSDP2 reduces
            in half precision; with `compensated`, a model that FSDP2 or tensor parallel splits, or
            that has an embedding with `sparse=True`; another `Updater` has this object.
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

        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> updater = ms.Updater(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.0),
        ...     accumulation=Wide(compensated=True))
        >>> rows = [torch.full((1, 1), x) for x in (1e9, 3.0, -1e9)]
        >>> record = updater.update(rows, lambda m, x: m(x).sum(), count=ms.rows())
        >>> model.weight.grad  # 0 without
        tensor([[1.]])

    Reference:
        Ogita, Rump and Oishi 2005, Accurate Sum and Dot Product, SIAM J. Sci. Comput. 26(6).
    """

    def __init__(self, *, compensated: bool = False) -> None:
        if not isinstance(compensated, bool):
            raise TypeError(
                f"`Wide(compensated={compensated!r})`: is no bool, so whether float32 sums are "
                "compensated would be a guess. Pass True or False."
            )
        self.compensated = compensated
        self._optimizer: torch.optim.Optimizer | None = None
        self._rests: Rests | None = None

    def __repr__(self) -> str:
        return "Wide(compensated=True)" if self.compensated else "Wide()"

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks | None
    ) -> None:
        """Take charge of every parameter of the optimizer that is in half precision, or of all."""
        if self._optimizer is not None and self._optimizer is not optimizer:
            raise ValueError(
                f"`accumulation={self!r}` is in another `Updater` already, with another optimizer: "
                "it would leave the sums of that one to autograd. Make one for each `Updater`."
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        has_half = any(p.dtype in _HALF for p in parameters)
        if self.compensated:
            self._check_compensated(model, parameters, ranks)
        elif not has_half:
            raise ValueError(
                "`accumulation=Wide()`: no parameter is in bfloat16 or float16, so every sum is "
                "wide already. Leave it out; under autocast the parameters are in float32. For "
                "float32 sums without the rounding of each addition pass `Wide(compensated=True)`."
            )
        if has_half:
            self._check_half(ranks)
        if ranks is None or not ranks.parallel.is_split:
            self._optimizer = optimizer
        if self.compensated:
            self._rests = Rests({p: name for name, p in model.named_parameters()})

    def begin(self) -> None:
        """Have autograd add in float32; the step has left each gradient in its own dtype."""
        for parameter in self._parameters(_HALF):
            _set_grad_dtype(parameter, torch.float32)

    def before_backward(self, *, index: int, syncs: bool) -> None:
        """Watch the additions to come, the last of which leave whole sums where ranks meet."""
        if self._rests is not None:
            self._rests.open(self._parameters(_WHOLE), is_last=syncs)

    def after_backward(self) -> None:
        """Let go of what a last one has made whole."""
        if self._rests is not None:
            self._rests.shut()

    def finish(self) -> None:
        """Make the sums whole."""
        if self._rests is not None:
            self._rests.fold_()

    def forget(self) -> None:
        """Let the rests go."""
        if self._rests is not None:
            self._rests.forget()

    def _parameters(self, dtypes: tuple[torch.dtype, ...]) -> list[Tensor]:
        """Those in charge, of groups added later, too."""
        groups = () if self._optimizer is None else self._optimizer.param_groups
        return [p for group in groups for p in group["params"] if p.dtype in dtypes]

    def _check_half(self, ranks: Ranks | None) -> None:
        if not hasattr(torch.Tensor, "grad_dtype"):
            raise NotImplementedError(
                f"`accumulation={self!r}` with torch {torch.__version__}: it needs "
                "`Tensor.grad_dtype`, as torch 2.13 has it."
            )
        narrow = [] if ranks is None else [str(d) for d in ranks.parallel.widen() if d in _HALF]
        if narrow:
            raise ValueError(
                f"`accumulation={self!r}`: the ranks add up gradients in "
                f"{', '.join(sorted(narrow))}, which would round them again. Pass "
                "`MixedPrecisionPolicy(reduce_dtype=torch.float32)` to `fully_shard`, and leave "
                "out `Sharding(reduce_every_microbatch=True)`."
            )

    def _check_compensated(
        self, model: nn.Module, parameters: list[Tensor], ranks: Ranks | None
    ) -> None:
        if not any(p.dtype in _WHOLE for p in parameters):
            raise ValueError(
                f"`accumulation={self!r}`: every parameter is in half precision, whose float32 "
                "sums are rounded once to 8 or 11 bits, so that rests would take 4 bytes a "
                "parameter more for digits which that rounding drops. Pass `Wide()`."
            )
        if ranks is not None and ranks.parallel.is_split:
            raise ValueError(
                f"`accumulation={self!r}` with a model that FSDP2 or tensor parallel splits: the "
                "sums of a window are kept out of `.grad`, where their additions are not seen. "
                "Leave `compensated` out; DDP has it."
            )
        known = set(parameters)
        sparse = [
            name
            for name, module in model.named_modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            and module.sparse
            and module.weight in known
        ]
        if sparse:
            raise ValueError(
                f"`accumulation={self!r}` with sparse gradients, of `{sparse[0]}`: their additions "
                "are put off to the step, where nothing would be left to compensate. Pass "
                "`sparse=False` to the embedding, or leave `compensated` out."
            )


def _set_grad_dtype(parameter: Tensor, dtype: torch.dtype) -> None:
    parameter.grad_dtype = dtype
