"""Loss terms: the names and the counts of what a mean loss is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .errors import WindowError

__all__ = ["checked_count", "terms_of"]


def terms_of(found: float | Mapping[str, float]) -> dict[str, float]:
    """Take what a count function returned as one number a term; a bare number is term `loss`."""
    if type(found) is int and found >= 0:  # nearly always, and a window's Python is made of this
        return {"loss": found}
    terms = found if isinstance(found, Mapping) else {"loss": found}
    return {str(term): checked_count(value, str(term)) for term, value in terms.items()}


def checked_count(value: Any, term: str) -> float:
    """Take a count as a plain number; a tensor of shape [] on an accelerator costs a host sync.

    Raises:
        WindowError: It is no count: negative, not finite, or not a number.
    """
    if type(value) is int and value >= 0:
        return value
    number = value.item() if hasattr(value, "item") else value
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not is_number or not math.isfinite(number) or number < 0:
        raise WindowError(
            f"The count of `{term}` is `{value!r}`, and a mean loss can only be over a finite "
            "number of at least 0. Return how many targets (or how much weight) the loss is summed "
            "over."
        )
    found: float = number
    return found
