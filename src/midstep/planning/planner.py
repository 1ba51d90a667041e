"""The planner: which ways there are to an update of so many rows, and which of them fit.

    peak = parameters + buffers + optimizer state + gradients + the most beyond them

State and gradients are measured on the model, the rest is traced at two sizes of the microbatch for
each precision and recompute; on fake tensors, so that nothing is computed and nothing is held.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ..arithmetic import Line, Sharded
from ..batches import num_rows
from ..cutting import Count
from ..precision import BF16, FP32, Precision
from ..recomputing import repeated_blocks
from ..snapshot import RandomState
from .recipes import leading_count
from .result import Plan
from .timer import Timer
from .trace import Loss, held_by, saved_by
from .tracer import Tracer
from .twin import Twin, fake_twin, real_copy
from .ways import Layout, Way, microbatches_for, reason

__all__ = ["plan"]

MakeOptimizer = Callable[[nn.Module], Any]


def plan(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    loss: Loss,
    *,
    optimizer: MakeOptimizer,
    rows: int | None = None,
    targets: int | None = None,
    count: Count | None = None,
    budget: int | None = None,
    headroom: float = 0.1,
    precisions: Sequence[Precision] | None = None,
    every: Sequence[int] | None = None,
    pieces: Sequence[int] | None = None,
    num_ranks: int = 1,
    sharded: Sharded = Sharded.NOTHING,
    exactly: bool = False,
    timed: bool = False,
) -> Plan:
    """Find ways to reach a target of rows or targets an update, and what each holds and costs.

    Nothing is computed and no memory is taken, unless it is `timed`: the model is traced on fake
    tensors, so one of seven billion parameters is planned on a laptop. Give a function to make such
    a model at all. A model whose shapes depend on values is copied and run instead. The way that is
    chosen can be run and measured: `found.check(...)`.

    Args:
        model: The model, which is left alone; or a function that makes it.
        batch: One batch, for shapes and dtypes; pieces and repetitions of it are microbatches.
        loss: `loss(model, microbatch)`: the loss sum, a `LossSum`, or one per term.
        optimizer: Makes the optimizer from the model.
        rows: Rows of an update, of all ranks together.
        targets: Instead of rows: targets of an update, as many a row as `count` finds in `batch`.
        count: What the mean is over, in one microbatch; for `targets`.
        budget: Bytes of the device of one rank; None ranks by time alone.
        headroom: The share of the budget set aside for workspaces and fragmentation; a line of its
            own.
        precisions: To choose from; `FP32()` and `BF16()` by default.
        every: Blocks to recompute together, to choose from; 0 is none. By default none, one, and
            the square root of their number.
        pieces: Numbers of microbatches to choose from; 1, 2, 4 ... up to single rows by default.
        num_ranks: Ranks that share the work.
        sharded: What is cut over them.
        exactly: Trace each way at its own size. Otherwise the best few are, and the others, read
            between the smallest and the largest size, are upper bounds.
        timed: Run the model for real, at two sizes for each precision and recompute, and rank by
            what they took instead of by operations. It must be a model, and fit in `batch`.

    Raises:
        ValueError: Not exactly one of `rows` and `targets`, a number is out of its range, `targets`
            without `count`, or the loss is not one number that depends on a parameter.
        TypeError: A model that must be run, as with `timed`, is given as a function, or there is no
            model.

    Example:
        >>> import torch
        >>> found = plan(
        ...     nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)),
        ...     torch.zeros(8, 64),
        ...     lambda model, x: model(x).square().sum(),
        ...     optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        ...     rows=4096,
        ...     budget=3_000_000,
        ... )
        >>> best = found.ways[0]
        >>> best.rows, best.num_microbatches, best.precision, best.fits
        (512, 8, 'FP32', True)
    """
    _check_numbers(budget=budget, headroom=headroom, num_ranks=num_ranks, pieces=pieces)
    wanted = _rows_wanted(rows, targets, count, batch)
    draws = RandomState.capture_torch()
    share = math.ceil(wanted / num_ranks)
    twin, sizes, notes = _twin(model, batch, loss, share, pieces)
    if precisions is None:
        precisions, left_out = _usable_precisions(twin, loss, sizes)
        notes += left_out
    layout = Layout(num_ranks, sharded, _largest_block(twin.model, sharded))
    num_aside = round(headroom * budget) if budget is not None else 0
    room = None if budget is None else budget - num_aside
    tracer = Tracer(twin, loss, [size for size, _ in sizes], layout, held_by(twin, optimizer))
    settings = itertools.product(precisions, _every(every, twin.model), sizes, layout.deferrals())
    timer = _timer(model, batch, loss, [size for size, _ in sizes]) if timed else None
    found = [_way(tracer, timer, room, *setting) for setting in settings]
    ways = tracer.exactly(found, room, few=len(found) if exactly else 3)
    saved_bytes_a_row = tracer.saved_bytes_a_row
    draws.restore()
    return Plan(
        rows=wanted,
        num_ranks=num_ranks,
        state=layout.state(tracer.held, defers=True),
        saved_bytes_a_row=saved_bytes_a_row,
        headroom=Line("headroom", num_aside, f"{100 * headroom:.3g} % of the budget"),
        budget=budget,
        ways=[dataclasses.replace(w, why=reason(w, budget, num_aside)) for w in ways],
        note=" ".join(notes),
    )


_NEEDS_VALUES = (
    "`plan(...)`: the shapes in this model's forward depend on values (`.item()`, `nonzero`, "
    "boolean indexing), which a trace without memory has not. Pass the model itself instead of a "
    "function that makes it: it is then run for real."
)
_RUN_FOR_REAL = (
    "Shapes in this forward depend on values, so a copy of the model was run for real, on no more "
    "rows than the batch has."
)


def _twin(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    loss: Loss,
    rows: int,
    pieces: Sequence[int] | None,
) -> tuple[Twin, list[tuple[int, int]], list[str]]:
    """Make the twin, without memory where that can be; give the sizes it is run at, and why."""
    twin = fake_twin(model, batch)
    sizes = _sizes(rows, pieces, twin.model)
    if _is_traced_without_values(twin, loss, sizes):
        return twin, sizes, []
    if not isinstance(model, nn.Module):
        raise TypeError(_NEEDS_VALUES)
    here = num_rows(batch)
    sizes = [size for size in sizes if size[0] <= here] or [(here, math.ceil(rows / here))]
    return real_copy(model, batch), sizes, [_RUN_FOR_REAL]


def _is_traced_without_values(twin: Twin, loss: Loss, sizes: Sequence[tuple[int, int]]) -> bool:
    try:
        saved_by(twin, loss, rows=min(size for size, _ in sizes), precision=FP32())
    except (DataDependentOutputException, DynamicOutputShapeException):
        return False
    return True


def _sizes(rows: int, pieces: Sequence[int] | None, model: nn.Module) -> list[tuple[int, int]]:
    """Give the sizes to choose from; one row has no statistics for a BatchNorm."""
    sizes = list(microbatches_for(rows, pieces))
    has_norm = any(isinstance(m, _BatchNorm) and m.training for m in model.modules())
    if pieces is None and has_norm and len(sizes) > 1:
        return [size for size in sizes if size[0] > 1]
    return sizes


def _check_numbers(
    *, budget: int | None, headroom: float, num_ranks: int, pieces: Sequence[int] | None
) -> None:
    if budget is not None and not budget > 0:
        raise ValueError(f"`plan(budget={budget!r})`: must be more than 0 bytes, or None.")
    if not 0 <= headroom < 1:
        raise ValueError(
            f"`plan(headroom={headroom!r})`: is a share of the budget, from 0 to below 1."
        )
    if not num_ranks >= 1:
        raise ValueError(f"`plan(num_ranks={num_ranks!r})`: must be at least 1.")
    if pieces is not None and (not pieces or min(pieces) < 1):
        raise ValueError(f"`plan(pieces={pieces!r})`: each must be at least 1 microbatch.")


def _way(  # noqa: PLR0917 - what comes after the room is one setting
    tracer: Tracer,
    timer: Timer | None,
    room: int | None,
    precision: Precision,
    every: int,
    size: tuple[int, int],
    defers: bool,
) -> Way:
    rows, pieces = size
    peak = tracer.peak(precision, every, rows, pieces, defers=defers)
    if timer is None:
        time = tracer.relative_flops(every)
    else:
        time = timer.relative(precision, every, rows, pieces)
    return Way(
        rows=rows,
        num_microbatches=pieces,
        precision=type(precision).__name__,
        every=every,
        defers=defers,
        peak_bytes=peak,
        relative_time=time,
        is_timed=timer is not None,
        fits=room is None or peak <= room,
        inexact=_inexact(tracer.model, precision, rows, pieces),
    )


def _timer(
    model: nn.Module | Callable[[], nn.Module], batch: Any, loss: Loss, sizes: Sequence[int]
) -> Timer:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"`plan({model!r}, timed=True)`: a function makes a model without memory, which cannot "
            "be run. Pass the model, or leave `timed` out."
        )
    return Timer(model, batch, loss, sizes)


def _rows_wanted(rows: int | None, targets: int | None, count: Count | None, batch: Any) -> int:
    if (rows is None) == (targets is None):
        raise ValueError(
            f"`plan(rows={rows}, targets={targets})`: give exactly one of the two, because each "
            "says in its own way how much an update is over."
        )
    if rows is not None:
        if rows < 1:
            raise ValueError(f"`plan(rows={rows})`: an update is over at least 1 row.")
        return rows
    assert targets is not None
    if targets < 1:
        raise ValueError(f"`plan(targets={targets})`: an update is over at least 1 target.")
    if count is None:
        raise ValueError(
            f"`plan(targets={targets})` without `count=`: how many targets a row holds is not "
            'known. Pass what the updater takes, such as `ms.targets(key="labels")`.'
        )
    found = leading_count(count, batch)
    if not found > 0:
        raise ValueError(
            f"`plan(targets={targets})`: the batch holds {found:g} targets, so no number of rows "
            "makes so many. Give a batch with targets."
        )
    return math.ceil(targets / (found / num_rows(batch)))


def _usable_precisions(
    twin: Twin, loss: Loss, sizes: Sequence[tuple[int, int]]
) -> tuple[list[Precision], list[str]]:
    """Offer float32, and bfloat16 where that is narrower and the model runs in it."""
    parameters = list(twin.model.parameters())
    if not any(p.is_floating_point() and p.element_size() > 2 for p in parameters):
        return [FP32()], []
    try:
        saved_by(twin, loss, rows=min(size for size, _ in sizes), precision=BF16())
    except (RuntimeError, TypeError) as error:
        first = str(error).partition("\n")[0]
        return [FP32()], [f"BF16 is left out, because the model does not run in it: {first}."]
    return [FP32(), BF16()], []


def _every(given: Sequence[int] | None, model: nn.Module) -> Sequence[int]:
    num = len(repeated_blocks(model))
    if given is not None:
        if not given or min(given) < 0 or max(given) > num:
            raise ValueError(
                f"`plan(every={given!r})`: the model repeats {num} blocks, so each must be from 0, "
                f"for no recompute, to {num}."
            )
        return given
    return sorted({0, 1, round(math.sqrt(num))}) if num else [0]


def _inexact(model: nn.Module, precision: Precision, rows: int, pieces: int) -> str:
    words = []
    if precision.autocast_dtype is not None:
        words.append(f"forward in {str(precision.autocast_dtype).removeprefix('torch.')}")
    modules = list(model.modules())
    if pieces > 1 and any(isinstance(m, _BatchNorm) and m.training for m in modules):
        words.append(f"BatchNorm over {rows} rows")
    if pieces > 1 and any(isinstance(m, _DropoutNd) and m.training and m.p for m in modules):
        words.append("other dropout draws")
    return ", ".join(words)


def _largest_block(model: nn.Module, sharded: Sharded) -> int:
    if sharded is not Sharded.PARAMETERS:
        return 0
    blocks = list(repeated_blocks(model).values()) or [model]
    return max(sum(p.nbytes for p in block.parameters()) for block in blocks)
