"""Missing: what to say when the tool that a sink writes for is not installed."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["imported"]


def imported(module: str, sink: str, extra: str) -> ModuleType:
    """Import the tool of a sink.

    Args:
        module: Its name.
        sink: Who asks.
        extra: Of which extra of midstep it is part.

    Raises:
        ImportError: It is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"`{sink}()` writes for `{module}`, which cannot be imported ({error}). Install it: "
            f"`pip install 'midstep[{extra}]'`. Or leave the sink out."
        ) from error
