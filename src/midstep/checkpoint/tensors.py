"""Tensors: taken out of nested states by name, and put back into room made for them.

What is left behind is a tensor on the meta device, of the same shape and dtype and no memory, so
that a state can be compared before its numbers are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

__all__ = ["Place", "chunk_of", "copy_whole", "local_of", "mapped", "replaced", "room_for"]


class Place(NamedTuple):
    """Where in a checkpoint's content a tensor stands.

    Attributes:
        part: `model`, `averaged_model` or `optimizer`.
        owner: The name of the weight it is; for optimizer state the position of its parameter.
        key: What it is called among all tensors, the same on every rank that has it.
    """

    part: str
    owner: str | int
    key: str


def replaced(
    content: Mapping[str, Any], function: Callable[[Place, Tensor], Any]
) -> dict[str, Any]:
    """Give a content again, each weight and each tensor of optimizer state replaced."""
    found = dict(content)
    for part in ("model", "averaged_model"):
        if content[part] is not None:
            found[part] = {
                name: function(Place(part, name, f"{part}/{name}"), value)
                if isinstance(value, Tensor)
                else value
                for name, value in content[part].items()
            }
    names = [name for group in content["groups"] for name in group]
    found["optimizer"] = dict(content["optimizer"])
    found["optimizer"]["state"] = {
        # What an optimizer keeps beside the state of its parameters has a key of its own.
        position: mapped(state, _named(function, position, names[position]))
        if isinstance(position, int)
        else state
        for position, state in content["optimizer"]["state"].items()
    }
    return found


def _named(
    function: Callable[[Place, Tensor], Any], position: int, name: str
) -> Callable[[tuple[Any, ...], Tensor], Any]:
    def call(path: tuple[Any, ...], tensor: Tensor) -> Any:
        key = f"optimizer/{name}" + "".join(f"[{step!r}]" for step in path)
        return function(Place("optimizer", position, key), tensor)

    return call


def mapped(
    value: Any, function: Callable[[tuple[Any, ...], Tensor], Any], path: tuple[Any, ...] = ()
) -> Any:
    """Give a nested state again, each tensor in it replaced by what `function` gives for it."""
    if isinstance(value, Tensor):
        return function(path, value)
    if isinstance(value, Mapping):
        items = {key: mapped(item, function, (*path, key)) for key, item in value.items()}
        return type(value)(items)  # type: ignore[call-arg] # all that is saved can be made so
    if type(value) in {list, tuple}:
        return type(value)(mapped(item, function, (*path, i)) for i, item in enumerate(value))
    return value


def local_of(tensor: Tensor) -> Tensor:
    """Give what of a tensor lies on this rank, in the same memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()


def chunk_of(tensor: DTensor) -> tuple[list[int], list[int]]:
    """Say which part of the whole lies on this rank: where it begins and how far it goes."""
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return list(chunk.offsets), list(chunk.sizes)


def room_for(saved: Tensor, like: Tensor) -> Tensor:
    """Make room on the host for what of a saved tensor belongs on this rank.

    Args:
        saved: Its whole shape and its dtype.
        like: The tensor it is for, or the parameter whose optimizer state it is.
    """
    if saved.shape == like.shape:
        return torch.empty_like(like.detach(), dtype=saved.dtype, device="cpu")
    if not isinstance(like, DTensor) or not saved.dim():
        return torch.empty(saved.shape, dtype=saved.dtype)
    # State of another shape than its parameter's, as Adafactor's, is whole on every rank.
    whole = torch.empty(saved.shape, dtype=saved.dtype)
    mesh = like.device_mesh
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def copy_whole(room: Tensor, whole: Tensor) -> None:
    """Fill room with its part of a whole tensor."""
    if not isinstance(room, DTensor):
        room.copy_(whole)
        return
    ends = zip(*chunk_of(room), strict=True)
    local_of(room).copy_(whole[tuple(slice(start, start + size) for start, size in ends)])
