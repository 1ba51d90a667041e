"""The memory of a training state: what is there before the first activation.

    state = parameters + gradients + optimizer state (+ master copy, + wide accumulators)

per rank, line by line. What is not known here is not guessed: activations, the workspaces of
kernels and what an allocator reserves come on top, and headroom for them is a line of its own.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence

from .optimizers import OPTIMIZERS, OptimizerKind, Shape, assumed_shapes
from .units import Dtype, show_bytes, show_count

__all__ = ["Line", "Memory", "Sharded", "State", "lora_parameters", "memory_of"]


class Sharded(enum.StrEnum):
    """What is cut over the ranks, each stage with all before it.

    Reference: Rajbhandari et al. 2019, arXiv:1910.02054 (ZeRO 1, 2 and 3; 3 is that of FSDP).
    """

    NOTHING = "none"
    OPTIMIZER = "zero1"
    GRADIENTS = "zero2"
    PARAMETERS = "zero3"


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One line of the sum.

    Attributes:
        name: What lies there.
        num_bytes: On one rank.
        note: How it comes about.
    """

    name: str
    num_bytes: int
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is trained, with what, over how many ranks.

    Attributes:
        trainable: Parameters that get a gradient.
        frozen: Parameters that get none: no gradient, no optimizer state.
        optimizer: Which keeps its state for the trainable ones.
        shapes: Of the trainable parameters, where they are known; they count instead of
            `trainable`.
        dtype: Of the weights.
        frozen_dtype: Of the frozen weights; None for `dtype`.
        grad_dtype: Of what accumulates in `.grad`; None for `dtype`. Wider than the weights it is
            the wide accumulator.
        state_dtype: Of the optimizer's state; None for that of the master copy.
        master: Whether a float32 copy of narrower weights is kept, which the optimizer steps.
        num_ranks: Ranks that share the work.
        sharded: What is cut over them.
        defers_sync: Whether gradients add up on each rank until the window's last microbatch, which
            costs whole gradients though they are sharded.
        largest_block: Parameters of the largest block that is gathered at a time, with `zero3`.

    Raises:
        ValueError: A number is out of range.
    """

    trainable: int = 0
    frozen: int = 0
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    shapes: Sequence[Shape] | None = None
    dtype: Dtype = Dtype.FP32
    frozen_dtype: Dtype | None = None
    grad_dtype: Dtype | None = None
    state_dtype: Dtype | None = None
    master: bool = False
    num_ranks: int = 1
    sharded: Sharded = Sharded.NOTHING
    defers_sync: bool = False
    largest_block: int = 0

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or min(self.trainable, self.frozen, self.largest_block) < 0:
            raise ValueError(
                f"`State(trainable={self.trainable}, frozen={self.frozen}, largest_block="
                f"{self.largest_block}, num_ranks={self.num_ranks})`: there is at least one rank, "
                "and no count is negative."
            )
        if not self.trainable + self.frozen and not self.shapes:
            raise ValueError("`State()` without parameters: there is nothing to add up.")


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """The sum, line by line, for one rank.

    Attributes:
        lines: What is there before activations.
        headroom: What is set aside for workspaces, fragmentation and the device's own context.
        budget: What the device has; None when it was not said.
        assumes: What holds only under an assumption.
    """

    lines: list[Line]
    headroom: Line
    budget: int | None = None
    assumes: list[str] = dataclasses.field(default_factory=list)

    @property
    def state_bytes(self) -> int:
        """The sum of the lines, before activations and headroom."""
        return sum(line.num_bytes for line in self.lines)

    @property
    def left_bytes(self) -> int | None:
        """What the budget leaves for activations; negative when it does not even hold the state."""
        if self.budget is None:
            return None
        return self.budget - self.state_bytes - self.headroom.num_bytes

    def rows(self) -> list[Line]:
        """Give every line, sums included, in the order of the table."""
        rows = [
            *self.lines,
            Line("before activations", self.state_bytes, "the sum of the lines above"),
            self.headroom,
        ]
        if self.budget is not None and self.left_bytes is not None:
            rows.append(Line("budget", self.budget))
            rows.append(Line("left for activations", self.left_bytes, "budget less all of it"))
        return rows

    def __str__(self) -> str:
        width = max(len(line.name) for line in self.rows())
        lines = [
            f"{line.name:{width}}  {show_bytes(line.num_bytes):>24}  {line.note}".rstrip()
            for line in self.rows()
        ]
        return "\n".join([*lines, *(f"Assumed: {what}." for what in self.assumes)])


def memory_of(state: State, *, budget: int | None = None, headroom: float = 0.1) -> Memory:
    """Add up what a training state takes on one rank.

    Args:
        state: What is trained, with what.
        budget: Bytes of the device; None for no comparison.
        headroom: The share set aside, of the budget or without one of the sum; from 0 to below 1.

    Raises:
        ValueError: The share is out of range.

    Example:
        >>> memory = memory_of(State(trainable=400_000_000, optimizer=OptimizerKind.ADAM))
        >>> print(memory)
        parameters            1.60 GB (1.49 GiB)  400M fp32
        gradients             1.60 GB (1.49 GiB)  400M fp32
        optimizer state       3.20 GB (2.98 GiB)  first and second moments, fp32
        before activations    6.40 GB (5.96 GiB)  the sum of the lines above
        headroom            640.00 MB (610.35 MiB)  10 % of the sum: workspaces, fragmentation
        >>> memory.state_bytes
        6400000000
    """
    if not 0 <= headroom < 1:
        raise ValueError(f"`headroom={headroom}`: is a share, from 0 to below 1.")
    shapes = assumed_shapes(state.trainable) if state.shapes is None else list(state.shapes)
    trainable = sum(math.prod(shape) for shape in shapes)
    lines = [
        *_weights(state, trainable),
        *_gradients(state, trainable),
        *_optimizer(state, shapes, trainable),
        *_gathered(state),
    ]
    total = sum(line.num_bytes for line in lines)
    whole, of = (total, "the sum") if budget is None else (budget, "the budget")
    aside = Line(
        "headroom",
        round(headroom * whole),
        f"{100 * headroom:.3g} % of {of}: workspaces, fragmentation",
    )
    assumes = OPTIMIZERS[state.optimizer].assumes if state.shapes is None and trainable else ""
    return Memory(lines, aside, budget, [assumes] if assumes else [])


def lora_parameters(rank: int, matrices: Sequence[tuple[int, int, int]]) -> int:
    """Count the parameters of low-rank adapters.

        sum over matrices of number * rank * (rows + columns)

    Args:
        rank: Of each adapter; at least 1.
        matrices: Number, rows and columns of each kind of matrix that is adapted.

    Raises:
        ValueError: A number is below 1.

    Example:
        >>> lora_parameters(16, [(128, 4096, 4096)])
        16777216

    Reference: Hu et al. 2021, arXiv:2106.09685.
    """
    if rank < 1 or any(min(kind) < 1 for kind in matrices):
        raise ValueError(f"`lora_parameters({rank}, {matrices})`: each number is at least 1.")
    return sum(number * rank * (rows + columns) for number, rows, columns in matrices)


def _share(num_bytes: float, state: State, *, is_cut: bool) -> int:
    return math.ceil(num_bytes / state.num_ranks if is_cut else num_bytes)


def _cut_words(state: State, *, is_cut: bool) -> str:
    return f", 1/{state.num_ranks} of it here" if is_cut and state.num_ranks > 1 else ""


def _weights(state: State, trainable: int) -> list[Line]:
    is_cut = state.sharded is Sharded.PARAMETERS
    words = _cut_words(state, is_cut=is_cut)
    lines = []
    if trainable:
        num_bytes = _share(trainable * state.dtype.width, state, is_cut=is_cut)
        lines.append(Line("parameters", num_bytes, f"{show_count(trainable)} {state.dtype}{words}"))
    if state.frozen:
        dtype = state.frozen_dtype or state.dtype
        num_bytes = _share(state.frozen * dtype.width, state, is_cut=is_cut)
        lines.append(
            Line("frozen parameters", num_bytes, f"{show_count(state.frozen)} {dtype}{words}")
        )
    return lines


def _gradients(state: State, trainable: int) -> list[Line]:
    if not trainable:
        return []
    stages = (Sharded.GRADIENTS, Sharded.PARAMETERS)
    is_cut = state.sharded in stages and not state.defers_sync
    dtype = state.grad_dtype or state.dtype
    is_wide = dtype.width > state.dtype.width
    note = f"{show_count(trainable)} {dtype}{_cut_words(state, is_cut=is_cut)}"
    if state.sharded in stages and state.defers_sync and state.num_ranks > 1:
        note += ", whole until the last microbatch"
    name = "wide accumulators" if is_wide else "gradients"
    lines = [Line(name, _share(trainable * dtype.width, state, is_cut=is_cut), note)]
    if is_wide:
        # The optimizer wants them in the dtype of what it steps.
        stepped = Dtype.FP32 if state.master else state.dtype
        if stepped.width != dtype.width:
            num_bytes = _share(trainable * stepped.width, state, is_cut=is_cut)
            lines.append(Line("gradients", num_bytes, f"cast to {stepped} for the step"))
    return lines


def _optimizer(state: State, shapes: Sequence[Shape], trainable: int) -> list[Line]:
    if not trainable:
        return []
    is_cut = state.sharded is not Sharded.NOTHING
    words = _cut_words(state, is_cut=is_cut)
    lines = []
    if state.master:
        num_bytes = _share(trainable * Dtype.FP32.width, state, is_cut=is_cut)
        lines.append(Line("master weights", num_bytes, f"{show_count(trainable)} fp32{words}"))
    dtype = state.state_dtype or (Dtype.FP32 if state.master else state.dtype)
    kept = OPTIMIZERS[state.optimizer]
    num_bytes = _share(kept.of(shapes, dtype.width), state, is_cut=is_cut)
    note = f"{kept.name}, {dtype}{words}" if num_bytes else kept.name
    lines.append(Line("optimizer state", num_bytes, note))
    return lines


def _gathered(state: State) -> list[Line]:
    if state.sharded is not Sharded.PARAMETERS or not state.largest_block:
        return []
    # The block that computes and the one that is fetched meanwhile, each whole.
    num_bytes = math.ceil(2 * state.largest_block * state.dtype.width)
    return [Line("gathered blocks", num_bytes, f"2 x {show_count(state.largest_block)} at a time")]
