"""TensorBoard event files, read without TensorBoard: the scalars in them.

A file is a chain of records, each `length (8 bytes), crc of it (4), data, crc of it (4)`, and the
data of each is a protobuf message `Event`. Of it only the fields that carry scalars are decoded:

    Event:   wall_time = 1 (double), step = 2 (varint), summary = 5
    Summary: value = 1;  Value: tag = 1, simple_value = 2 (float), tensor = 8
    Tensor:  dtype = 1, tensor_content = 4, float_val = 5 (floats), double_val = 6 (doubles)

Reference: `event.proto`, `summary.proto`, `tensor.proto` of TensorFlow; protobuf's encoding guide.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .errors import ReportError

__all__ = ["Scalar", "scalars"]

_FLOAT, _DOUBLE = 1, 2  # of `DataType`
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types of protobuf


class Scalar(NamedTuple):
    """One value of one tag at one step."""

    step: float
    tag: str
    value: float


class _Field(NamedTuple):
    number: int
    value: int  # a varint
    data: bytes  # any other


def scalars(path: Path) -> Iterator[Scalar]:
    """Read every scalar, in the order they were written.

    A last record that was cut short is left out. Checksums are not checked.

    Args:
        path: An event file.

    Raises:
        ReportError: The file does not hold such records.
    """
    for data in _records(path):
        try:
            yield from _scalars_of(data)
        except (IndexError, struct.error, UnicodeDecodeError, _UnknownWireType) as error:
            raise ReportError(
                f"`{path}` is not an event file of TensorBoard: a record cannot be decoded."
            ) from error


class _UnknownWireType(Exception):
    """Bytes that are no protobuf message."""


def _records(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", head[:8])
            if length > size:
                if file.tell() == 12:
                    raise ReportError(
                        f"`{path}` is not an event file of TensorBoard: its first record would be "
                        f"{length:,} bytes long, and the file has {size:,}."
                    )
                return
            data = file.read(length + 4)
            if len(data) < length + 4:
                return  # torn: its writer was killed, or is writing
            yield data[:-4]


def _scalars_of(event: bytes) -> Iterator[Scalar]:
    step, summaries = 0, list[bytes]()
    for field in _fields(event):
        if field.number == 2:
            step = field.value
        elif field.number == 5:
            summaries.append(field.data)
    for summary in summaries:
        for field in _fields(summary):
            if field.number == 1:
                tag, value = _value_of(field.data)
                if value is not None:
                    yield Scalar(float(step), tag, value)


def _value_of(message: bytes) -> tuple[str, float | None]:
    tag, value = "", None
    for field in _fields(message):
        if field.number == 1:
            tag = field.data.decode()
        elif field.number == 2 and len(field.data) == 4:
            value = float(struct.unpack("<f", field.data)[0])
        elif field.number == 8:
            value = _scalar_of_tensor(field.data)
    return tag, value


def _scalar_of_tensor(message: bytes) -> float | None:
    dtype, data = 0, b""
    for field in _fields(message):
        if field.number == 1:
            dtype = field.value
        elif field.number in (4, 5, 6) and field.data:
            data = field.data
    if dtype == _FLOAT and len(data) == 4:
        return float(struct.unpack("<f", data)[0])
    if dtype == _DOUBLE and len(data) == 8:
        return float(struct.unpack("<d", data)[0])
    return None  # a histogram, an image, a text


def _fields(message: bytes) -> Iterator[_Field]:
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield _Field(number, value, b"")
            continue
        if wire == _LENGTH:
            length, at = _varint(message, at)
        elif wire in (_FIXED64, _FIXED32):
            length = 8 if wire == _FIXED64 else 4
        else:
            raise _UnknownWireType
        if at + length > len(message):
            raise IndexError
        yield _Field(number, 0, message[at : at + length])
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
