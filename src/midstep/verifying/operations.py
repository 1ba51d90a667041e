"""Operations: to see, or to change, each one that a forward and its backward are made of."""

from __future__ import annotations

from typing import Any, Protocol

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["SeesOperations", "seen_by"]


class SeesOperations(Protocol):
    """Whoever is handed each operation in the place of torch."""

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and return its result.

        Args:
            func: The operation, without autograd.
            args: Its arguments.
            kwargs: Its named arguments.
        """
        ...


def seen_by(observer: SeesOperations) -> TorchDispatchMode:
    """Return a context in which every operation is handed to an observer.

    Args:
        observer: Runs them.
    """
    return _Handing(observer)


class _Handing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, observer: SeesOperations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._observer.see(func, args, kwargs or {})
