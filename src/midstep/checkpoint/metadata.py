"""The index of a folder, which torch writes as a pickle and reads back by running what it says.

Here it is read by an unpickler that knows the dozen classes such an index is made of and refuses
everything else, and what it gives is checked before anybody believes it.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from ..errors import CheckpointError
from .together import cause_of

__all__ = ["read_metadata"]


def read_metadata(folder: Path) -> metadata.Metadata:
    """Read which file of a folder holds which part of which tensor, without running code.

    Raises:
        CheckpointError: It is not there, is no such index, or asks for anything else.
    """
    path = folder / ".metadata"
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
        _check(found)
    except FileNotFoundError:
        raise _unreadable(folder, "it is a folder without `.metadata`") from None
    except Exception as error:  # random bytes make an unpickler raise almost anything
        raise _unreadable(folder, f"its `.metadata`: {cause_of(error)}") from error
    assert isinstance(found, metadata.Metadata)
    return found


class _Unpickler(pickle.Unpickler):
    """Gives the classes of an index by exactly their names, and nothing for any other name."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return _admitted()[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for `{module}.{name}`") from None


@functools.cache
def _admitted() -> dict[tuple[str, str], Any]:
    """What torch's own writer puts in: records without code of their own, sizes and dtypes."""
    classes: list[type] = [
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,  # noqa: SLF001 - torch pickles it by this name
        filesystem._StorageInfo,  # noqa: SLF001 - torch pickles it by this name
    ]
    found: dict[tuple[str, str], Any] = {(c.__module__, c.__qualname__): c for c in classes}
    found["torch", "Size"] = torch.Size
    layout: Callable[[str], torch.layout] = torch.serialization._get_layout  # noqa: SLF001
    found["torch.serialization", "_get_layout"] = layout  # looks a name up among the layouts
    for name, value in vars(torch).items():
        if isinstance(value, torch.dtype):
            found["torch", name] = value
    return found


def _check(found: Any) -> None:
    """Believe only what a checkpoint of midstep can hold: tensors, in files of its own folder."""
    _require(isinstance(found, metadata.Metadata), "it is something else")
    for key, tensor in found.state_dict_metadata.items():
        # Anything but a tensor would be unpickled by torch with all it asks for.
        is_tensor = isinstance(key, str) and isinstance(tensor, metadata.TensorStorageMetadata)
        _require(is_tensor, f"`{key}` is no tensor")
        _require(isinstance(tensor.properties.dtype, torch.dtype), f"`{key}` has no dtype")
        _require(_is_size(tensor.size), f"`{key}` has no size")
        for chunk in tensor.chunks:
            is_chunk = isinstance(chunk, metadata.ChunkStorageMetadata)
            _require(is_chunk and _is_size(chunk.offsets, chunk.sizes), f"`{key}` has no parts")
    for index, place in found.storage_data.items():
        _require(isinstance(index, metadata.MetadataIndex), "a part has no name")
        _require(isinstance(place, filesystem._StorageInfo), "a part has no place")  # noqa: SLF001
        name, numbers = place.relative_path, (place.offset, place.length)
        is_here = isinstance(name, str) and name.endswith(".distcp") and Path(name).name == name
        _require(is_here, f"`{name!r}` is no file of this folder")
        _require(not place.transform_descriptors, f"`{name}` was transformed")
        is_inside = all(isinstance(n, int) and n >= 0 for n in numbers)
        _require(is_inside, f"`{name}` holds no such place")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _is_size(*sizes: Any) -> bool:
    return all(isinstance(size, torch.Size) and min(size, default=0) >= 0 for size in sizes)


def _unreadable(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"`{folder}` cannot be read as a checkpoint: {why}. It may be a copy with parts missing, "
        "or written by something else. Nothing was changed."
    )
