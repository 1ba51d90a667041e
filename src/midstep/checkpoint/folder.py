"""A folder: a checkpoint of many ranks, in the format of `torch.distributed.checkpoint`.

    .metadata      which file holds which part of which tensor; written when all else is on disk
    __0_0.distcp   tensors, each part once, the work shared by the ranks; and so on
    rank-0.pt      what is one rank's: random streams, place in the data, buffers; and so on

torch gathers no tensor for it, and on another number of ranks each reads the parts it needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_shared
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from ..errors import CheckpointError
from ..ranks import Ranks
from .alike import that_differ
from .content import require_plain
from .file import check_sums, not_written, read_content, write_content, writing_sums
from .layout import Layout, Progress
from .metadata import read_metadata
from .replacing import discard, name_of, part_of, replace, settle, sync_folder
from .tensors import Place, local_of, mapped, replaced
from .together import cause_of, joint_error, together

__all__ = ["Folder", "write_folder"]

_FORMAT = "midstep checkpoint of one rank"


def write_folder(path: Path, content: Mapping[str, Any], ranks: Ranks) -> None:
    """Write a checkpoint beside `path`, each rank its share, and put it there once all are done.

    About ten small collectives, a read of what several ranks hold, and a write of each part once.

    Raises:
        CheckpointError: Some rank could not write; every rank raises it, and what was saved before
            is whole.
        RankFailure: A rank is gone; what was saved before is whole.
    """
    greeting = _greet(path, content, ranks)
    skeleton, tensors = together(ranks, lambda: _taken_apart(content))
    differ = that_differ(tensors, ranks)
    own = {key: local_of(tensors.pop(key)).cpu().clone() for key in differ}
    of_rank = {**skeleton, **dataclasses.asdict(greeting), "format": _FORMAT, "own": own}
    part, rank = part_of(path), ranks.world.rank
    _on_disk(path, ranks, lambda: None if rank else _begin(path))
    try:
        _on_disk(path, ranks, lambda: _write_own(part, of_rank, rank))
        _write_shared(path, tensors, greeting.save, ranks)
        _on_disk(path, ranks, lambda: None if rank else _finish(path))
    except Exception:
        if not rank:
            with contextlib.suppress(OSError):
                discard(part)
        raise


@dataclasses.dataclass(frozen=True, slots=True)
class _Greeting:
    """What the ranks tell each other before they save.

    Attributes:
        save: What marks all files of this checkpoint as of one save.
        layout: Over how many ranks the run is spread.
        progress: How far into its pass each rank is.
    """

    save: str
    layout: Layout
    progress: list[Progress]


def _greet(path: Path, content: Mapping[str, Any], ranks: Ranks) -> _Greeting:
    own = (os.fspath(path), uuid.uuid4().hex, Progress.of(content["updater"]["cursor"]))
    with ranks.failing():
        everyone = ranks.world.gather_objects(own)
    paths = [theirs for theirs, _, _ in everyone]
    if len(set(paths)) > 1:
        error = CheckpointError(
            f"`save`: the ranks were given different paths, {paths}, and one checkpoint is in one "
            "place. Pass the same path on every rank."
        )
        error.on_all_ranks = True
        raise error
    return _Greeting(everyone[0][1], Layout.of(ranks), [progress for _, _, progress in everyone])


def _taken_apart(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Part what is written to the file of this rank from the tensors that are shared out."""
    tensors: dict[str, Tensor] = {}

    def take_out(place: Place, tensor: Tensor) -> Tensor:
        is_split = isinstance(tensor, DTensor)
        if place.part == "optimizer" and not tensor.dim() and not is_split:
            return tensor  # a number of steps, for which a place of its own would be too much
        tensors[place.key] = tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def refuse_split(path: tuple[Any, ...], tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            where = "".join(f"[{step!r}]" for step in path)
            raise TypeError(
                f"The state at `{where}` is a `DTensor`, which could only be read back on as many "
                "ranks. Keep `full_tensor()` or the local part."
            )
        return tensor

    skeleton = replaced(content, take_out)
    require_plain(mapped(skeleton, refuse_split))
    return skeleton, tensors


def _on_disk(path: Path, ranks: Ranks, step: Callable[[], None]) -> None:
    def attempt() -> None:
        try:
            step()
        except (OSError, RuntimeError) as error:  # a full disk may be either
            raise not_written(path, error) from error

    together(ranks, attempt)


def _begin(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    settle(path)
    part_of(path).mkdir()


def _write_own(part: Path, content: Mapping[str, Any], rank: int) -> None:
    if not part.is_dir():
        raise FileNotFoundError(
            f"rank 0 made `{part}`, and here it is not to be seen: all ranks must share the file "
            "system"
        )
    write_content(part / name_of(rank), content)


class _Writer(FileSystemWriter):
    """Leaves the path of this machine out of the index, and the mark of the save in."""

    def __init__(self, path: Path, save: str) -> None:
        super().__init__(part_of(path))
        self._path = path
        self._save = save

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(save_id=self._save)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            with writing_sums():
                return super().write_data(plan, planner)
        except (OSError, RuntimeError) as error:
            # Said here: what an error was caused by does not travel to the other ranks.
            raise not_written(self._path, error) from error


def _write_shared(path: Path, tensors: dict[str, Tensor], save: str, ranks: Ranks) -> None:
    """Share out the tensors, each part to one of the ranks that hold it."""
    failures: dict[int, Any] = {}
    with ranks.failing():
        try:
            save_shared(
                tensors,
                storage_writer=_Writer(path, save),
                planner=DefaultSavePlanner(flatten_state_dict=False),
            )
        except CheckpointException as error:  # every rank gets the same
            failures = error.failures
    if failures:
        errors = {rank: failure for rank, (failure, _) in failures.items()}
        own = errors.get(ranks.world.rank)
        if own is not None and not isinstance(own, Exception):
            raise own  # an interrupt, which torch caught
        said: list[tuple[str, str] | None] = [None] * ranks.world.size
        for rank, failure in errors.items():
            is_said = isinstance(failure, CheckpointError)
            worded = failure if is_said else not_written(path, failure)
            said[rank] = (CheckpointError.__name__, str(worded))
        raise joint_error(said) from own


def _finish(path: Path) -> None:
    sync_folder(part_of(path))
    replace(path)


class Folder:
    """A checkpoint of many ranks, opened by one rank of any number.

    Args:
        path: The folder.
        layout: Over how many ranks this run is spread.
        rank: This one.

    Attributes:
        content: That of this rank where the layout is the same, else of the first; tensors left
            out.
        layout: Over how many ranks the saved run was spread.
        progress: How far into its pass each of them was.

    Raises:
        CheckpointError: It cannot be read, or its files are not of one save.
    """

    def __init__(self, path: Path, layout: Layout, rank: int) -> None:
        self._path = path
        self._metadata = read_metadata(path)
        self.content = self._read(0)
        self.layout = Layout(**self.content["layout"])
        self.progress = [Progress(**each) for each in self.content["progress"]]
        if rank and self.layout == layout:
            self.content = self._read(rank)
        self._own: dict[str, Tensor] = self.content["own"]

    def _read(self, rank: int) -> dict[str, Any]:
        if not (self._path / name_of(rank)).is_file():
            raise self._unreadable(f"it is a folder without `{name_of(rank)}`")
        content = read_content(self._path / name_of(rank), expected=_FORMAT)
        meta = self._metadata.storage_meta
        if not isinstance(meta, StorageMeta) or meta.save_id != content["save"]:
            raise self._unreadable(f"`{name_of(rank)}` and `.metadata` are not of one save")
        return content

    def _unreadable(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"`{self._path}` cannot be read as a checkpoint: {why}. It may be a copy with parts "
            "missing, or written by something else. Nothing was changed."
        )

    @property
    def keys_of_one_rank(self) -> set[str]:
        """The tensors of which ranks held different versions."""
        return set(self._own)

    def fill(self, rooms: Mapping[str, Tensor]) -> None:
        """Read what belongs on this rank. No collective.

        Raises:
            CheckpointError: Something cannot be read, or is not there.
        """
        shared: dict[str, Tensor] = {}
        for key, room in rooms.items():
            own = self._own.get(key)
            if own is None:
                shared[key] = room
            elif own.shape == local_of(room).shape:
                local_of(room).copy_(own)
            else:
                raise self._unreadable(f"the part of `{key}` on each rank was another")
        try:
            self._read_shared(shared)
        except CheckpointError:
            raise
        except Exception as error:  # as for one file
            raise self._unreadable(cause_of(error)) from error

    def _read_shared(self, rooms: dict[str, Tensor]) -> None:
        """Do what `torch.distributed.checkpoint.load` does, of which no step needs another rank."""
        planner, reader = _Planner(), FileSystemReader(self._path)
        planner.set_up_planner(dict(rooms), self._metadata, is_coordinator=True)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = planner.create_local_plan()
        num_read = dict.fromkeys(rooms, 0)
        for item in plan.items:
            num_read[item.dest_index.fqn] += math.prod(item.lengths)
        for key, room in rooms.items():
            saved = self._metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)  # or it would have been refused
            if num_read[key] != local_of(room).numel() or saved.properties.dtype != room.dtype:
                raise self._unreadable(f"parts of `{key}` are missing, or are of another dtype")
        self._check_sums({item.storage_index for item in plan.items})
        reader.read_data(plan, planner).wait()

    def _check_sums(self, parts: Iterable[MetadataIndex]) -> None:
        """Look for bytes that have changed, in each part that is about to be read."""
        for part in parts:
            place = self._metadata.storage_data[part]
            with (self._path / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                check_sums(io.BytesIO(file.read(place.length)))


class _Planner(DefaultLoadPlanner):
    """Reads tensors, and nothing that torch would unpickle with all it asks for."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ValueError(f"`{read_item.dest_index.fqn}` is no tensor")
