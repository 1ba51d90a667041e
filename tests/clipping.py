"""What the tests of gradients and clip rules share: parameters with gradients, and an oracle."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

_CASES = json.loads((Path(__file__).parent / "data" / "clip.json").read_text(encoding="utf-8"))
VECTORS: dict[str, dict[str, Any]] = {case["id"]: case for case in _CASES["cases"]}


def numbers(values: Any) -> Tensor:
    """A tensor of a case of tests/data/clip.json, in which nan and inf are strings."""
    if isinstance(values, list):
        return torch.stack([numbers(value) for value in values])
    return torch.tensor(float(values), dtype=torch.float64)


def with_gradient(grad: Tensor, weights: Tensor | None = None) -> nn.Parameter:
    """A parameter whose gradient is this very tensor."""
    weights = (
        torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
        if weights is None
        else weights
    )
    parameter = nn.Parameter(weights)
    parameter.grad = grad
    return parameter


def with_gradients(*grads: Tensor) -> list[nn.Parameter]:
    return [with_gradient(grad) for grad in grads]


def grads_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the gradients, as they are now."""
    return [p.grad.clone() for p in parameters if p.grad is not None]


def entries_of(tensors: Sequence[Tensor]) -> np.ndarray:
    """Every magnitude, in extended precision: squares of doubles neither overflow nor vanish."""
    parts = []
    for tensor in tensors:
        dense = (tensor.to_dense() if tensor.is_sparse else tensor).detach().cpu().resolve_conj()
        wide = (
            dense.to(torch.complex128 if dense.is_complex() else torch.float64).reshape(-1).numpy()
        )
        parts.append(np.abs(wide.astype(np.clongdouble if dense.is_complex() else np.longdouble)))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.longdouble)


def exact_norm(tensors: Sequence[Tensor], p: float = 2.0) -> float:
    """The norm of all entries together, straight from its definition."""
    entries = entries_of(tensors)
    if math.isinf(p):
        return float(entries.max(initial=0.0))
    return float((entries**p).sum() ** (1 / np.longdouble(p)))


class Passes(TorchDispatchMode):
    """Counts how often the memory of some tensors is read, in whole passes.

    A multiplication in place is one pass: it reads each entry once.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._storages = {t.untyped_storage().data_ptr() for t in tensors}
        self._num_entries = sum(t.numel() for t in tensors)
        self._read = 0

    @property
    def num(self) -> float:
        return self._read / self._num_entries

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            for leaf in tree_leaves((args, kwargs or {})):
                if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() in self._storages:
                    self._read += leaf.numel()
        return func(*args, **(kwargs or {}))
