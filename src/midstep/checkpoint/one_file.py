"""One file for many ranks: each takes its part of tensors that were saved whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from .file import read_content
from .layout import Layout, Progress
from .tensors import Place, copy_whole, mapped, replaced

__all__ = ["OneFile", "made_whole"]


def made_whole(content: dict[str, Any]) -> dict[str, Any]:
    """Give a content again, with the tensors whole that one rank alone has split."""

    def whole(_: tuple[Any, ...], tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    found: dict[str, Any] = mapped(content, whole)
    return found


class OneFile:
    """A checkpoint of one rank, opened by one of many, which takes its part of whole tensors.

    Attributes:
        content: All of it, tensors left out.
        layout: That of one rank.
        progress: That of one rank.
    """

    layout = Layout(1, 1)

    def __init__(self, path: Path) -> None:
        self._tensors: dict[str, Tensor] = {}
        self.content = replaced(read_content(path, lies_on_disk=True), self._take_out)
        self.progress = [Progress.of(self.content["updater"]["cursor"])]

    def _take_out(self, place: Place, tensor: Tensor) -> Tensor:
        self._tensors[place.key] = tensor
        return tensor.to("meta")

    @property
    def keys_of_one_rank(self) -> set[str]:
        """None: there was only one rank."""
        return set()

    def fill(self, rooms: Mapping[str, Tensor]) -> None:
        """Copy in what belongs on this rank."""
        for key, room in rooms.items():
            copy_whole(room, self._tensors[key])
