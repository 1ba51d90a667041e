"""Where the numbers of a gradient lie, and whether each can be changed by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["editable", "part_from_each_other", "values_of"]


def values_of(tensor: Tensor) -> Tensor:
    """Give the tensor that holds the numbers: of a sparse one, the summed values.

    Raises:
        TypeError: It is neither dense nor COO sparse.
    """
    if tensor.layout is torch.strided:
        return tensor
    if tensor.layout is not torch.sparse_coo:
        raise TypeError(
            f"A gradient of shape {list(tensor.shape)} is {tensor.layout}, whose entries cannot be "
            "clipped in place. Use a dense or a COO sparse gradient."
        )
    return tensor.coalesce().values()  # an index listed twice would count as two entries


def editable(parameter: Tensor) -> Tensor:
    """The numbers of a gradient, in memory where each can be changed by itself."""
    grad = parameter.grad
    assert grad is not None
    if grad.layout is torch.sparse_coo and not grad.is_coalesced():
        parameter.grad = grad = grad.coalesce()
    values = values_of(grad)
    if (values.is_contiguous() or _is_injective(values)) and not (
        values.is_inference() or values.is_conj()
    ):
        return values
    return _copied(parameter)


def _copied(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.grad = grad = parameter.grad.resolve_conj().clone()
    return values_of(grad)


def _is_injective(tensor: Tensor) -> bool:
    """Whether no two entries share memory, as far as the strides tell."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def part_from_each_other(parameters: Sequence[Tensor], tensors: list[Tensor]) -> None:
    """Copy each gradient that begins inside another, or the shared part is multiplied twice."""
    starts = [t.data_ptr() for t in tensors]
    end = 0
    for index in sorted(range(len(tensors)), key=starts.__getitem__):
        if starts[index] < end and tensors[index].numel():
            tensors[index] = _copied(parameters[index])
        else:
            end = max(end, starts[index] + tensors[index].nbytes)
