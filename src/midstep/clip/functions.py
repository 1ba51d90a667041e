"""The drop-in functions: torch's names and signatures, for those who keep their own step.

One import changes and three faults go: norms that overflow, vanish or lose digits; norms returned in
bfloat16; and non-finite gradients that pass in silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import NonFiniteGradient
from ..gradients import Gradients, combined_norm, tensor_norms
from .rule import shrink
from .value import clamp_

__all__ = ["clip_grad_norm_", "clip_grad_value_", "total_norm"]

Parameters = Tensor | Iterable[Tensor]


def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = True,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the gradients by their joint norm, as `torch.nn.utils.clip_grad_norm_` means to.

        g <- g * min(1, max_norm / ||g||)

    Differs from torch's where torch's is wrong: the norm is right to 1e-6 at any size, magnitude and
    dtype; a norm that is at most `max_norm` changes nothing; non-finite gradients are an error unless
    told otherwise, and then nothing is changed either; a parameter listed twice counts once; a
    generator that was already read is refused.

    Args:
        parameters: A tensor, or tensors, with gradients.
        max_norm: In units of the gradient.
        norm_type: Order of the norm; 2 and `math.inf` cost one read, others two in float64.
        error_if_nonfinite: Raise when an entry is inf or nan.
        foreach: As in torch: False multiplies tensor by tensor.

    Returns:
        The norm before clipping. Shape [], on the first gradient's device, float32 or wider.

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
    gradients = Gradients(_listed(parameters, "clip_grad_norm_"))
    norm = _norm_of(gradients.tensors, norm_type)
    if math.isfinite(norm):
        coefficient = shrink(norm, max_norm)
        if coefficient != 1.0:
            with torch.no_grad():
                if foreach is False:
                    for tensor in gradients.tensors:
                        tensor.mul_(coefficient)
                else:
                    gradients.mul_(coefficient)
                    gradients.apply_()
    elif error_if_nonfinite:
        raise _nonfinite(gradients, norm_type)
    return _as_tensor(norm, gradients.tensors)


def clip_grad_value_(
    parameters: Parameters, clip_value: float, foreach: bool | None = None
) -> None:
    """Clamp every entry of every gradient, as `torch.nn.utils.clip_grad_value_` does.

        g <- min(max(g, -clip_value), clip_value), entry by entry

    Changes the direction. An infinite entry becomes a finite one without a word, as in torch: look
    first. Also clamps complex gradients, real and imaginary part apart.

    Args:
        parameters: A tensor, or tensors, with gradients.
        clip_value: The bound on one entry.
        foreach: As in torch: False clamps tensor by tensor.

    Raises:
        ValueError: A generator without a parameter in it.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, -0.5])
        >>> clip_grad_value_([weight], 1.0); weight.grad
        tensor([ 1.0000, -0.5000])
    """
    tensors = Gradients(_listed(parameters, "clip_grad_value_")).tensors
    with torch.no_grad():
        if foreach is False:
            for tensor in tensors:
                clamp_([tensor], float(clip_value))
        elif tensors:
            clamp_(tensors, float(clip_value))


def total_norm(
    tensors: Parameters,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = True,
    foreach: bool | None = None,
) -> Tensor:
    """Measure the joint norm of tensors, as `torch.nn.utils.get_total_norm` means to.

        ||(t_1, t_2, ...)||,   right to 1e-6 of float64 at any size, magnitude and dtype

    Args:
        tensors: A tensor, or tensors: gradients themselves, not parameters.
        norm_type: Order of the norm; 2 and `math.inf` cost one read, others two in float64.
        error_if_nonfinite: Raise when an entry is inf or nan.
        foreach: Taken for torch's sake; the measure is the same.

    Returns:
        The norm. Shape [], on the first tensor's device, float32 or wider.

    Raises:
        NonFiniteGradient: (a RuntimeError) An entry is inf or nan.

    Example:
        >>> total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
        tensor(5.)
    """
    parts = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    norm = _norm_of(parts, float(norm_type))
    if error_if_nonfinite and not math.isfinite(norm):
        raise NonFiniteGradient(_message(float(norm_type), "`tensors`"), parameters={})
    return _as_tensor(norm, parts)


def _listed(parameters: Any, name: str) -> list[Tensor]:
    if isinstance(parameters, Tensor):
        return [parameters]
    listed = list(parameters)
    if not listed and not isinstance(parameters, (list, tuple)):
        raise ValueError(
            f"`{name}` got a `{type(parameters).__name__}` without a parameter in it, so nothing "
            "would be clipped. A generator such as `model.parameters()` is empty once it was read; "
            "pass a fresh one or a list."
        )
    return listed


def _norm_of(tensors: list[Tensor], order: float) -> float:
    if order > 0:
        return combined_norm(tensor_norms(tensors, order), order)
    # Orders that are no norms, for torch's sake: of the vector of each tensor's own.
    each = [torch.linalg.vector_norm(t.double(), order).item() for t in tensors]
    return torch.linalg.vector_norm(torch.tensor(each, dtype=torch.float64), order).item()


def _as_tensor(norm: float, tensors: list[Tensor]) -> Tensor:
    if not tensors:
        return torch.tensor(0.0)
    first = tensors[0]
    wide = torch.float64 if first.dtype in (torch.float64, torch.complex128) else torch.float32
    return torch.tensor(norm, dtype=wide, device=first.device)


def _nonfinite(gradients: Gradients, order: float) -> NonFiniteGradient:
    counts = {
        f"parameters[{index}]": count
        for index, count in enumerate(gradients.num_nonfinite())
        if count
    }
    where = ", ".join(f"{name} ({count})" for name, count in list(counts.items())[:5])
    return NonFiniteGradient(
        f"{_message(order, '`parameters`')} Entries by position among those with a gradient: "
        f"{where}.",
        parameters=counts,
    )


def _message(order: float, what: str) -> str:
    return (
        f"The total norm of order {order} for gradients from {what} is non-finite, so it cannot be "
        "clipped: an infinite norm would zero every other entry, a nan one would spread. Nothing was "
        "changed. To let it pass, set `error_if_nonfinite=False`."
    )
