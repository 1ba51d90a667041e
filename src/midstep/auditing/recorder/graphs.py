"""Graphs: parameters that no optimizer holds, losses that are kept alive, and sums in 16 bits."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor

from ..events import Backward, Place
from .parameters import Parameters, sample_of

__all__ = ["SIXTEEN_BITS", "Graphs", "Shadows"]

MAX_NODES = 20_000  # walked for parameters without optimizer
GRAPHS_PER_LINE = 2
MAX_KEPT = 64

SIXTEEN_BITS = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


class _Sentinel:
    """Lies in the graph of a loss, and is gone when the graph is."""

    __slots__ = ("__weakref__",)


class Graphs:
    """What is found in the graphs of losses: the first two of each line are walked as a whole."""

    __slots__ = ("_kept", "_walked")

    def __init__(self) -> None:
        self._walked: dict[Place | None, int] = {}
        self._kept: list[weakref.ref[_Sentinel]] = []

    def keep(self, roots: list[Tensor]) -> int:
        """Mark the graph of a loss, and return how many earlier ones are still alive.

        The loss that was logged last is still alive, and no fault.

        Args:
            roots: What backward is called on.
        """
        alive = [ref for ref in self._kept if ref() is not None]
        self._kept = alive[-MAX_KEPT:]
        root = roots[0].grad_fn if len(roots) == 1 else None
        if root is not None:
            metadata: dict[Any, Any] = root.metadata  # type: ignore[assignment]  # no method
            self._kept.append(weakref.ref(metadata.setdefault("midstep", _Sentinel())))
        return max(0, len(alive) - 1)

    def parameters(self, place: Place | None, roots: list[Tensor]) -> list[Tensor]:
        """Return the parameters that a graph ends in; nothing of one that is too large, or known.

        Args:
            place: Of the backward.
            roots: What it is called on.
        """
        walked = self._walked.get(place, 0)
        if walked >= GRAPHS_PER_LINE:
            return []
        self._walked[place] = walked + 1
        stack = [root.grad_fn for root in roots if root.grad_fn is not None]
        seen = set(stack)
        found: list[Tensor] = []
        while stack:
            node = stack.pop()
            variable = getattr(node, "variable", None)
            if isinstance(variable, torch.nn.Parameter):
                found.append(variable)
            for child, _ in node.next_functions:
                if child is not None and child not in seen:
                    seen.add(child)
                    stack.append(child)
            if len(seen) > MAX_NODES:
                return []
        return found


class Shadows:
    """Sums of sampled gradients in double precision, beside those of 16 bits in `.grad`."""

    __slots__ = ("_handles", "_sums")

    def __init__(self) -> None:
        self._sums: dict[int, list[float]] = {}
        self._handles: dict[int, Any] = {}

    def begin(self, parameters: Parameters) -> None:
        """Watch what arrives at probed parameters of 16 bits.

        Args:
            parameters: Of all optimizers.
        """
        for watched in parameters.watched.values():
            for key in watched.probes:
                p = parameters.param(key)
                if key in self._handles or p.dtype not in SIXTEEN_BITS:
                    continue

                def add(grad: Tensor, key: int = key) -> None:
                    values = sample_of(grad)
                    if values is not None and key in self._handles:
                        sums = self._sums.get(key) or [0.0] * len(values)
                        self._sums[key] = [a + b for a, b in zip(sums, values, strict=True)]

                self._handles[key] = p.register_hook(add)  # type: ignore[no-untyped-call]

    def clear(self, keys: frozenset[int]) -> None:
        """Begin sums anew.

        Args:
            keys: Parameters whose gradients were cleared.
        """
        for key in keys & self._sums.keys():
            del self._sums[key]

    def compare(self, parameters: Parameters, event: Backward) -> None:
        """Write down how far `.grad` is from the sums.

        Args:
            parameters: Of all optimizers.
            event: The backward that just ran.
        """
        errors = []
        for key, sums in self._sums.items():
            values, size = parameters.sample(key), math.hypot(*sums)
            if values is not None and size and key in event.params:
                gaps = [a - b for a, b in zip(values, sums, strict=True)]
                errors.append(math.hypot(*gaps) / size)
        event.shadow_error = max(errors, default=math.nan)
        probes = [key for w in parameters.watched.values() for key in w.probes]
        dtypes = {parameters.param(key).dtype for key in probes if key in event.params}
        event.dtype = next((SIXTEEN_BITS[d] for d in dtypes if d in SIXTEEN_BITS), "")

    def end(self) -> None:
        """Watch no more."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._sums.clear()
