"""One file: a checkpoint of one rank, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from ..errors import CheckpointError
from .content import FORMAT, SCHEMA, require_plain
from .replacing import discard, part_of, replace, settle
from .together import cause_of

__all__ = [
    "check_sums",
    "not_written",
    "read_content",
    "write_content",
    "write_file",
    "writing_sums",
]


def write_file(path: Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint beside `path`, have it on disk, and put it there.

    Raises:
        CheckpointError: It cannot be written; what was saved before is whole.
        TypeError: A state holds something that a safe load could not read back.
    """
    require_plain(content)
    part = part_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        settle(path)
        try:
            write_content(part, content)
            replace(path)
        except (OSError, RuntimeError):
            with contextlib.suppress(OSError):
                discard(part)
            raise
    except (OSError, RuntimeError) as error:
        raise not_written(path, error) from error


def write_content(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain values and tensors to a file with checksums, and have it on disk."""
    with writing_sums(), path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def writing_sums() -> Iterator[None]:
    """Have torch write checksums in here, whatever the program told it."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def not_written(path: Path, error: BaseException) -> CheckpointError:
    """Say why a checkpoint could not be written."""
    # A full disk reaches torch's writer, which then fails in its own words.
    cause = error.__context__ if isinstance(error.__context__, OSError) else error
    return CheckpointError(
        f"`{path}` could not be written: {cause_of(cause)}. The checkpoint saved before, if any, "
        "is whole. Free space, or save to another folder."
    )


def check_sums(archive_file: Path | IO[bytes]) -> None:
    """Look for bytes that are not as they were written, which `torch.load` does not do.

    Raises:
        BadZipFile: The archive is broken, or a part has changed.
    """
    with zipfile.ZipFile(archive_file) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"`{damaged}` in it has changed since it was written")


def read_content(
    path: Path, *, expected: str = FORMAT, lies_on_disk: bool = False
) -> dict[str, Any]:
    """Read what `write_content` wrote, without running code that is in it.

    Reads the file twice, once for its checksums, which `torch.load` does not look at.

    Args:
        path: The file.
        expected: Its format.
        lies_on_disk: Leave tensors there until they are copied.

    Raises:
        CheckpointError: There is none, it cannot be read, or it is something else.
    """
    try:
        check_sums(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=lies_on_disk)
    except FileNotFoundError:
        raise CheckpointError(f"`{path}`: there is no such checkpoint.") from None
    except Exception as error:  # random bytes make an unpickler raise almost anything
        raise CheckpointError(
            f"`{path}` cannot be read as a checkpoint: {cause_of(error)}. It may be cut short, or "
            "written by something else. Nothing was changed."
        ) from error
    if not isinstance(content, dict) or content.get("format") != expected:
        raise CheckpointError(
            f"`{path}` is no {expected}. Nothing was changed. For bare weights use "
            "`model.load_state_dict`."
        )
    schema = content.get("schema")
    if schema != SCHEMA:
        raise CheckpointError(
            f"`{path}` has schema {schema}, this version of midstep reads {SCHEMA}. Nothing was "
            "changed. Load it with the version that saved it."
        )
    return content
