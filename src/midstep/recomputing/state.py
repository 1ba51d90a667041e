"""State that a forward changes: found when it is changed, and put back after a second run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .runs import version_of

__all__ = ["ChangedBuffers", "Versions", "changed", "versions_of"]

Versions = dict[str, tuple[int, int]]


def versions_of(block: nn.Module) -> Versions:
    """Note which buffers a block has and how often each was changed.

    Args:
        block: Before its forward.
    """
    return {name: (id(b), version_of(b)) for name, b in block.named_buffers()}


def changed(block: nn.Module, versions: Versions) -> set[str]:
    """Name the buffers of every module that has changed one of its own since.

    Args:
        block: After its forward.
        versions: Noted before it.
    """
    found: set[str] = set()
    for owner, module in block.named_modules():
        own = {
            f"{owner}.{name}" if owner else name: b
            for name, b in module.named_buffers(recurse=False)
        }
        # The kernel of BatchNorm writes its statistics without raising their version.
        has_statistics = isinstance(module, _NormBase) and module.training
        if has_statistics or any((id(b), version_of(b)) != versions.get(k) for k, b in own.items()):
            found |= own.keys()
    return found


class ChangedBuffers:
    """The buffers that forwards of blocks change, kept aside while those forwards run again.

    Costs a copy of them for as long.

    Args:
        blocks: By name.
        changing: The names of the buffers each changes, by block.
    """

    __slots__ = ("_kept",)

    def __init__(self, blocks: Mapping[str, nn.Module], changing: Mapping[str, set[str]]) -> None:
        self._kept: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for name, keys in changing.items():
            for key in keys:
                owner, _, leaf = key.rpartition(".")
                module = blocks[name].get_submodule(owner)
                buffer = module.get_buffer(leaf)
                self._kept.append((module, leaf, buffer, buffer.detach().clone()))

    @torch.no_grad()
    def restore(self) -> None:
        """Put every one of them back, also where a forward has put another tensor in its place."""
        for module, name, buffer, kept in self._kept:
            buffer.copy_(kept)
            module.register_buffer(name, buffer, persistent=name not in _not_persistent(module))


def _not_persistent(module: Any) -> set[str]:
    found: set[str] = module._non_persistent_buffers_set  # noqa: SLF001 - torch has no other way
    return found
