"""Where rows meet: the first operation after which a row depends on another, with its line.

The forward runs twice, the second time with half of the rows replaced. Operations are compared in
order; the first whose result moved at a row that was not replaced is where rows met, because all
that came before it did not move there. Where no such operation has rows in its result, rows met in
a number for the whole batch: the first that is neither the sum of those of two halves nor a mean of
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import linecache
import sys
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .layers import relative_move, rows_dims, taken
from .operations import seen_by

__all__ = ["Meeting", "first_meeting"]

_SUM_NOISE = 2.0**8  # units of roundoff: two halves are summed in another order than the whole
_TORCH = str(Path(torch.__file__).parent)
_MIDSTEP = str(Path(__file__).parents[1] / "verifying")


@dataclasses.dataclass(frozen=True, slots=True)
class Meeting:
    """An operation at which rows meet.

    Attributes:
        operation: Its name in torch.
        place: File and line of the code that called it; empty when there is none outside torch.
        code: That line.
        module: The innermost module that makes its rows; None in a loss.
        moved: How far its result moved, as a share of the largest entry.
    """

    operation: str
    place: str
    code: str
    module: str | None
    moved: float


@dataclasses.dataclass(slots=True)
class _Step:
    operation: str
    outputs: list[Tensor]
    place: tuple[str, int]
    module: str | None


class _Trace:
    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self._inside: list[str] = []

    @contextlib.contextmanager
    def within(self, model: nn.Module) -> Iterator[None]:
        """Know in which module each operation is."""
        handles = []
        try:
            for name, module in model.named_modules():
                enter = functools.partial(self._enter, name)
                handles.append(module.register_forward_pre_hook(enter, prepend=True))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, *_: object) -> None:
        self._inside.append(name)

    def _leave(self, *_: object) -> None:
        self._inside.pop()

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if not func.is_view:
            outputs = [t.detach().clone() for t in tree_leaves(result) if isinstance(t, Tensor)]
            module = self._inside[-1] if self._inside else None
            self.steps.append(_Step(func.overloadpacket.__name__, outputs, _caller(), module))
        return result


def first_meeting(
    model: nn.Module,
    run: Callable[[list[int]], object],
    num_rows: int,
    rewind: Callable[[], None],
    *,
    shares: Sequence[float],
    sound: Collection[str],
) -> Meeting | None:
    """Find the first operation of a forward at which rows meet.

    Inside of a module whose rows come out independent they may meet and part again, as where each
    expert is given its own rows; such meetings are passed over.

    Costs four or five forwards, and the memory of every intermediate result of each.

    Args:
        model: Whose modules are named.
        run: Computes the loss of some rows.
        num_rows: Rows of the batch.
        rewind: Called before each run, so that all draw the same.
        shares: What the first half may weigh in a mean.
        sound: Modules in which nothing is looked for.
    """

    def traced(rows: list[int]) -> list[_Step]:
        rewind()
        trace = _Trace()
        with torch.no_grad(), trace.within(model), seen_by(trace):
            run(rows)
        return trace.steps

    half = num_rows // 2
    rows, kept = list(range(num_rows)), list(range(half, num_rows))
    whole, more = traced(rows), traced([*rows, 0])
    replaced = traced([*(half + i % (num_rows - half) for i in range(half)), *rows[half:]])
    if [s.operation for s in whole] != [s.operation for s in more]:
        return None
    for step, longer, other in zip(whole, more, replaced, strict=False):
        if step.operation != other.operation:
            return None
        if step.module in sound:
            continue
        for old, big, new in zip(step.outputs, longer.outputs, other.outputs, strict=False):
            spots = rows_dims(old, big.shape, num_rows)
            if not spots or old.shape != new.shape:
                continue
            if moved := relative_move(taken(old, spots, kept), taken(new, spots, kept)):
                return _meeting(step, moved)
    return _first_number(whole, traced(rows[:half]), traced(rows[half:]), shares)


def _first_number(
    whole: list[_Step], first: list[_Step], second: list[_Step], shares: Sequence[float]
) -> Meeting | None:
    """Find the first result without rows that is no sum and no mean of those of two halves."""
    for step, one, two in zip(whole, first, second, strict=False):
        if not step.operation == one.operation == two.operation:
            return None
        for all_of_it, a, b in zip(step.outputs, one.outputs, two.outputs, strict=False):
            if not all_of_it.is_floating_point() or not all_of_it.shape == a.shape == b.shape:
                continue
            ways = [a + b, *(share * a + (1 - share) * b for share in (0.5, *shares))]
            is_shared = not relative_move(all_of_it, a) and not relative_move(all_of_it, b)
            moves = [relative_move(all_of_it, way, _SUM_NOISE) for way in ways]
            if not is_shared and all(moves):
                # A number for the whole batch is part of a loss, wherever it is computed.
                return dataclasses.replace(_meeting(step, min(moves)), module=None)
    return None


def _meeting(step: _Step, moved: float) -> Meeting:
    file, line = step.place
    return Meeting(
        operation=step.operation,
        place=f"{file}:{line}" if file else "",
        code=linecache.getline(file, line).strip() if file else "",
        module=step.module,
        moved=moved,
    )


def _caller() -> tuple[str, int]:
    frame: types.FrameType | None = sys._getframe(1)  # noqa: SLF001 - inspect.stack reads the source of every frame
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _MIDSTEP, "<")):
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0
