"""Units: counts and bytes as people write them, and the widths of dtypes.

Decimal and binary units are different numbers (24 GB is 22.35 GiB), so both are always shown.
"""

from __future__ import annotations

import enum
import re

__all__ = ["Dtype", "parse_bytes", "parse_count", "show_bytes", "show_count"]

_COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_BYTES = {
    **{unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb"))},
    **{unit: 1024**power for power, unit in enumerate(("b", "kib", "mib", "gib", "tib"))},
}
_NUMBER = re.compile(r"(?P<number>\d[\d_,]*(?:\.\d+)?|\.\d+)\s*(?P<unit>[A-Za-z]*)")


class Dtype(enum.StrEnum):
    """How a number is kept, and so how wide it is.

    Example:
        >>> Dtype("bf16").width, Dtype("nf4").width
        (2.0, 0.515875)
    """

    FP64 = "fp64"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"
    NF4 = "nf4"

    @property
    def width(self) -> float:
        """Bytes a number; of block formats with the scales of their blocks."""
        return _WIDTHS[self]


_WIDTHS = {
    Dtype.FP64: 8.0,
    Dtype.FP32: 4.0,
    Dtype.BF16: 2.0,
    Dtype.FP16: 2.0,
    Dtype.FP8: 1.0,
    Dtype.INT8: 1.0,
    # 4 bits and 0.127 bits of doubly quantised scales: Dettmers et al. 2023, arXiv:2305.14314.
    Dtype.NF4: (4 + 0.127) / 8,
}


def parse_count(text: str) -> int:
    """Read a count such as `400M` or `7B`: k, M, B (or G) and T are powers of a thousand.

    Args:
        text: As it was typed.

    Raises:
        ValueError: It is no positive number with one of these letters.

    Example:
        >>> parse_count("400M"), parse_count("1.5b"), parse_count("12,000")
        (400000000, 1500000000, 12000)
    """
    return _parse(text, _COUNT, "a count such as `400M` or `7B`")


def parse_bytes(text: str) -> int:
    """Read a number of bytes such as `24GB` (decimal) or `24GiB` (binary).

    Args:
        text: As it was typed.

    Raises:
        ValueError: It is no positive number with one of these units.

    Example:
        >>> parse_bytes("24GB"), parse_bytes("1.5 GiB")
        (24000000000, 1610612736)
    """
    return _parse(text, _BYTES, "bytes with their unit, such as `24GB` or `24GiB`")


def show_bytes(num_bytes: float) -> str:
    """Spell a number of bytes in decimal and in binary units.

    Args:
        num_bytes: At least 0.

    Example:
        >>> show_bytes(6.4e9), show_bytes(512)
        ('6.40 GB (5.96 GiB)', '512 B')
    """
    for power, (decimal, binary) in enumerate(
        (("TB", "TiB"), ("GB", "GiB"), ("MB", "MiB"), ("kB", "KiB"))
    ):
        unit = 1000 ** (4 - power)
        if abs(num_bytes) >= unit:
            return (
                f"{num_bytes / unit:.2f} {decimal} ({num_bytes / 1024 ** (4 - power):.2f} {binary})"
            )
    return f"{num_bytes:.0f} B"


def show_count(count: float) -> str:
    """Spell a count in three or four digits.

    Args:
        count: At least 0.

    Example:
        >>> show_count(400_000_000), show_count(1_234), show_count(12)
        ('400M', '1.234k', '12')
    """
    for letter, unit in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= unit:
            return f"{count / unit:.4g}{letter}"
    return f"{count:.4g}"


def _parse(text: str, units: dict[str, int], wanted: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    unit = None if match is None else units.get(match["unit"].lower())
    if match is None or unit is None:
        raise ValueError(f"`{text}` is not {wanted}.")
    value = round(float(match["number"].replace("_", "").replace(",", "")) * unit)
    if value < 1:
        raise ValueError(f"`{text}` is less than 1, and so is not {wanted}.")
    return value
