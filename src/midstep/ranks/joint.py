"""The norm of parts taken together."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

__all__ = ["joint_norm"]


def joint_norm(parts: Sequence[float], p: float) -> float:
    """Join norms of parts, at any magnitude; nan when any is.

    Example:
        >>> joint_norm([3e200, 4e200], 2.0)
        5e+200
    """
    if any(math.isnan(part) for part in parts):
        return math.nan
    top = max(parts, default=0.0)
    if math.isinf(p) or top == 0.0 or math.isinf(top):
        return top
    total = top * math.pow(math.fsum(math.pow(n / top, p) for n in parts), 1.0 / p)
    return min(total, sys.float_info.max)
