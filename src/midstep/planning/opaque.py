"""Kernels whose fake twins keep silent about what they take, and so are asked for real.

oneDNN's recurrent layer (the LSTM of a CPU) saves a workspace for its backward, whose size only the
kernel knows; torch's shape function says 0. It is run once on zeros of the same shapes, and what it
holds is read from the allocator. All other operations of a step are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map

from .peaks import peak_of

__all__ = ["Inside", "inside"]


class Inside(NamedTuple):
    """What a kernel takes, in bytes.

    Attributes:
        outputs: Of each output's storage.
        transient: Within the kernel, beyond its outputs.
    """

    outputs: tuple[int, ...]
    transient: int


def inside(func: Any, args: Sequence[Any], kwargs: Any) -> Inside | None:
    """Run a kernel for real, if it is one of those that must be asked.

    Costs the memory and the time of that one kernel once more.

    Args:
        func: The operation.
        args: Its arguments, fake or not; only their shapes are used.
        kwargs: Its named arguments.

    Returns:
        What it takes; None for an operation whose outputs tell all.
    """
    aten = torch.ops.aten
    if func not in {aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default}:
        return None
    # The kernel makes its workspace only where gradients are on.
    with unset_fake_temporarily(), torch.enable_grad():
        real, named = tree_map(_zeros, list(args)), tree_map(_zeros, kwargs)
        if func is aten.mkldnn_rnn_layer_backward.default:
            real[-1] = _workspace(real)
        outputs: list[Any] = []
        peak = peak_of(lambda: outputs.extend(func(*real, **named)))
        sizes = tuple(_size(output) for output in outputs)
    return Inside(sizes, max(0, peak.num_bytes - sum(sizes)))


def _zeros(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_()


def _workspace(args: Sequence[Any]) -> Tensor:
    """Make the workspace of a backward, which only its forward can."""
    tensors = args[:7]
    reverse, mode, hidden, layers, biases, train, bidirectional, sizes, first = args[13:22]
    made = torch.ops.aten.mkldnn_rnn_layer.default(
        *tensors,
        *(reverse, sizes, mode, hidden, layers, biases, bidirectional, first, train),
    )
    workspace: Tensor = made[3]
    return workspace


def _size(output: Any) -> int:
    return output.untyped_storage().nbytes() if isinstance(output, Tensor) else 0
