"""The drop-in functions: torch's names and signatures, for those who keep their own step.

One import changes and three faults go: norms that overflow, vanish or lose digits; norms returned
in bfloat16; and non-finite gradients that pass in silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import NonFiniteGradient
from .checks import listed
from .parts import Parts, gradients_of, parts_of
from .rule import shrink
from .value import clamp_

__all__ = ["clip_grad_norm_", "clip_grad_value_", "total_norm"]

Parameters = Tensor | Iterable[Tensor]


def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = True,
    foreach: bool | None = None,  # noqa: ARG001 - part of torch's signature
) -> Tensor:
    """Clip the gradients by their joint norm, as `torch.nn.utils.clip_grad_norm_` means to.

        g <- g * min(1, max_norm / ||g||)

    Differs from torch's where torch's is wrong. The norm is right to 1e-6 at any size, magnitude
    and dtype. A norm that is at most `max_norm` changes nothing. A parameter listed twice counts
    once. A generator that was already read is refused. Non-finite gradients are an error unless
    told otherwise, and are never changed: torch's would multiply them by 0 or nan and lose what
    there was to see. Of DTensors the norm is that of the whole, over any mixture of meshes and of
    plain tensors, for one small collective an axis; torch's fails on a mixture.

    Args:
        parameters: A tensor, or tensors, with gradients.
        max_norm: In units of the gradient.
        norm_type: Order of the norm; 2 and `math.inf` cost one read, others two in float64.
        error_if_nonfinite: Raise when an entry is inf or nan. If False, the gradients are left as
            they are and the norm that is returned tells.
        foreach: Taken for torch's sake; the result is the same.

    Returns:
        The norm before clipping. Shape [], on the first gradient's device, float32; float64 where
        the first gradient is, or where float32 cannot hold it.

    Raises:
        NonFiniteGradient: (a RuntimeError) An entry is inf or nan; nothing was changed.
        ValueError: A generator without a parameter in it, or a bad `max_norm`.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], max_norm=1.0), weight.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    if not max_norm >= 0:  # written so that nan fails too
        raise ValueError(
            f"`clip_grad_norm_(max_norm={max_norm})`: must be at least 0, because a norm cannot be "
            "less. To only measure, call `total_norm`."
        )
    gradients = gradients_of(listed(parameters, "`clip_grad_norm_`"))
    parts = Parts([p.grad for p in gradients.parameters if p.grad is not None], gradients.tensors)
    norm = parts.norm(norm_type)
    if math.isfinite(norm):
        gradients.mul_(shrink(norm, max_norm))
        gradients.apply_()
    elif error_if_nonfinite:
        raise _nonfinite(parts, norm_type, "parameters")
    return _as_tensor(norm, gradients.tensors)


def clip_grad_value_(
    parameters: Parameters,
    clip_value: float,
    foreach: bool | None = None,  # noqa: ARG001 - part of torch's signature
) -> None:
    """Clamp every entry of every gradient, as `torch.nn.utils.clip_grad_value_` does.

        g <- min(max(g, -clip_value), clip_value), entry by entry

    Changes the direction. An infinite entry becomes a finite one without a word and a nan stays, as
    in torch: look first. Also clamps complex gradients, real and imaginary part apart.

    Args:
        parameters: A tensor, or tensors, with gradients.
        clip_value: The bound on one entry.
        foreach: Taken for torch's sake; the result is the same.

    Raises:
        ValueError: A generator without a parameter in it, or a bad `clip_value`.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, -0.5])
        >>> clip_grad_value_([weight], 1.0); weight.grad
        tensor([ 1.0000, -0.5000])
    """
    clip_value = float(clip_value)
    if not clip_value >= 0:  # written so that nan fails too
        raise ValueError(
            f"`clip_grad_value_(clip_value={clip_value})`: must be at least 0, because no number "
            "lies between a negative bound and its negative."
        )
    tensors = gradients_of(listed(parameters, "`clip_grad_value_`")).tensors
    if tensors:
        with torch.no_grad():
            clamp_(tensors, clip_value)


def total_norm(
    tensors: Parameters,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = True,
    foreach: bool | None = None,  # noqa: ARG001 - part of torch's signature
) -> Tensor:
    """Measure the joint norm of tensors, as `torch.nn.utils.get_total_norm` means to.

        ||(t_1, t_2, ...)||,   right to 1e-6 of float64 at any size, magnitude and dtype

    Args:
        tensors: A tensor, or tensors: gradients themselves, not parameters.
        norm_type: Order of the norm; 2 and `math.inf` cost one read, others two in float64.
        error_if_nonfinite: Raise when an entry is inf or nan.
        foreach: Taken for torch's sake; the result is the same.

    Returns:
        The norm. Shape [], on the first tensor's device, float32; float64 where the first tensor
        is, or where float32 cannot hold it.

    Raises:
        NonFiniteGradient: (a RuntimeError) An entry is inf or nan.

    Example:
        >>> total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
        tensor(5.)
    """
    parts = parts_of([tensors] if isinstance(tensors, Tensor) else list(tensors))
    norm = parts.norm(float(norm_type))
    if error_if_nonfinite and not math.isfinite(norm):
        raise _nonfinite(parts, float(norm_type), "tensors")
    return _as_tensor(norm, parts.tensors)


def _as_tensor(norm: float, tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return torch.tensor(0.0)
    first = tensors[0]
    narrow = torch.tensor(norm, dtype=torch.float32)
    is_wide = first.dtype in (torch.float64, torch.complex128)
    is_lost = math.isfinite(norm) and not math.isclose(narrow.item(), norm, rel_tol=1e-6)
    dtype = torch.float64 if is_wide or is_lost else torch.float32
    return torch.tensor(norm, dtype=dtype, device=first.device)


def _nonfinite(parts: Parts, order: float, what: str) -> NonFiniteGradient:
    counts = {f"{what}[{i}]": count for i, count in enumerate(parts.num_nonfinite()) if count}
    where = ", ".join(f"`{name}` ({count:,})" for name, count in list(counts.items())[:5])
    return NonFiniteGradient(
        f"The total norm of order {order} for gradients from `{what}` is non-finite, so it cannot "
        "be clipped: an infinite norm would zero every other entry, a nan one would spread. "
        "Nothing was changed. Non-finite entries, by position among those with a gradient: "
        f"{where or 'none'}. To let it pass, set `error_if_nonfinite=False`.",
        parameters=counts,
    )
