"""Events: what a watched loop did, in order, as plain values without a tensor in them.

A recorder writes them, the checks read them; they can be pickled, so that one process may judge
what many ranks did. Parameters are small integers, the same integer for the same tensor all along.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from .written import written

# fmt: off
__all__ = [
    "Asked", "Backward", "Cast", "Clear", "Clip", "Collective", "Epoch", "Event", "Factor",
    "Forward", "HostRead", "Loaded", "NewOptimizer", "NewSchedule", "Place", "Recompute",
    "Recording", "Replaced", "Rescaled", "Saved", "ScalerStep", "ScalerUpdate", "Step", "Term",
    "Tick", "Unscale",
]
# fmt: on

NOTHING: frozenset[int] = frozenset()


class Place(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    function: str = ""


class Factor(NamedTuple):
    """A number that a loss was multiplied by on its way from a reduction to the backward."""

    is_division: bool
    value: float  # the multiplier: 0.25 for a division by 4


@written
class Term:
    """One reduction under the scalar that backward was called on.

    Attributes:
        kind: Name of the reduction in the autograd graph.
        is_mean: Whether it divides by its own count.
        count: What its mean is over (targets, elements, or a sum of weights); nan where unknown.
        numel: Elements, or targets, that go in.
        weight: The gradient that arrived at it: what it counts for in the loss; nan if unmeasured.
        mask_sum: Sum of the mask under it; nan where there is none.
        is_weighted: Whether the count is a sum of class weights.
        is_linear: Whether only additions and constant factors lie between it and the loss.
        compares_rows: Whether each row is set against the other rows, as in a contrastive loss.
        factors: The constant factors on the way.
    """

    kind: str
    is_mean: bool
    count: float
    numel: int
    weight: float = math.nan
    mask_sum: float = math.nan
    is_weighted: bool = False
    is_linear: bool = True
    compares_rows: bool = False
    factors: tuple[Factor, ...] = ()


@written
class Event:
    """Something that happened at a line of the user's code; None where it was found out later."""

    place: Place | None


@written
class NewOptimizer(Event):
    """An optimizer, when it is first seen.

    Attributes:
        optimizer: Its number.
        name: Its class.
        params: Its parameters, each once.
        num_listed: Its parameters as listed.
        shapes: The shape of each parameter.
        takes_fused: Whether the class offers a fused step that was not asked for.
        is_sharded: Whether a parameter is one rank's part of a larger one.
        frozen: Parameters that take no gradient.
    """

    optimizer: int
    name: str
    params: frozenset[int]
    num_listed: int
    shapes: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    takes_fused: bool = False
    is_sharded: bool = False
    frozen: frozenset[int] = NOTHING


@written
class NewSchedule(Event):
    """A schedule, when it first ticks: the optimizer it drives, and its length where it has one."""

    schedule: int
    name: str
    optimizer: int | None
    horizon: float


@written
class Forward(Event):
    """A forward through a data-parallel wrapper, and whether its backward will be summed."""

    module: int
    syncs: bool
    params: frozenset[int] = NOTHING


@written
class Orphan:
    """A parameter that got a gradient and that no optimizer held, and where it was made."""

    key: int
    shape: tuple[int, ...]
    made: Place | None
    index: int = -1  # of the event it was made before; -1 if that was not seen


@written
class Backward(Event):
    """One backward that accumulates into `.grad`.

    Attributes:
        terms: The reductions under the loss.
        params: Parameters whose `.grad` it changed.
        orphans: Parameters it gave a gradient that no optimizer held.
        loss: Value of the loss; nan where it was not read.
        scale: The loss scale in it.
        scaler: Number of the scaler; None without.
        inside: The optimizer whose closure called it.
        syncs: Whether the wrapper was told to sum over ranks; None without a wrapper.
        shadow_error: Relative error of the gradient sum in `.grad` against a float32 sum; nan where
            it was not measured.
        dtype: Precision of the gradients, as "bfloat16"; empty where it was not looked at.
        batch_norms: Where layers were made that took statistics of the batch in this forward.
        num_kept: Earlier losses whose graphs are still alive.
        route: The lines of the user's code that led here, the innermost first.
    """

    terms: tuple[Term, ...] = ()
    params: frozenset[int] = NOTHING
    orphans: tuple[Orphan, ...] = ()
    loss: float = math.nan
    scale: float = 1.0
    scaler: int | None = None
    inside: int | None = None
    syncs: bool | None = None
    shadow_error: float = math.nan
    dtype: str = ""
    batch_norms: tuple[Place, ...] = ()
    num_kept: int = 0
    route: tuple[Place, ...] = ()


@written
class Clear(Event):
    """Gradients were cleared; `by` names the call, or is "hand"."""

    params: frozenset[int]
    by: str


@written
class Rescaled(Event):
    """Gradients were multiplied by hand between two watched calls; nan if not by one number."""

    params: frozenset[int]
    ratio: float


@written
class Clip(Event):
    """A clip of gradients.

    Attributes:
        by: "norm" or "value".
        given: Parameters that were given.
        params: Parameters that were given and have a gradient.
        num_given: Parameters that were given.
        limit: The largest norm or value.
        norm: The norm it returned; nan for a clip by value.
        raises: Whether a norm that is not finite is an error there.
        was_iterator: Whether an iterator was given, which can be read but once.
        is_local: Whether it saw one rank's shards.
        all_finite: Whether every gradient was finite although the norm was not.
        is_look: Whether only the norm was taken.
        inside: The optimizer whose closure called it.
    """

    by: str
    given: frozenset[int]
    params: frozenset[int]
    num_given: int
    limit: float
    norm: float = math.nan
    raises: bool = False
    was_iterator: bool = False
    is_local: bool = False
    all_finite: bool = False
    is_look: bool = False
    inside: int | None = None


@written
class Unscale(Event):
    """`GradScaler.unscale_`: with `again`, it had been called since the last update and raised."""

    scaler: int
    optimizer: int
    scale: float
    again: bool = False


@written
class ScalerStep(Event):
    """`GradScaler.step`, after it: whether the optimizer stepped.

    It raised with `again`: the second since the last update; with `is_empty`: no gradient at all.
    """

    scaler: int
    optimizer: int
    scale: float
    applied: bool = True
    again: bool = False
    is_empty: bool = False


@written
class ScalerUpdate(Event):
    """`GradScaler.update`: the scale before and after.

    Attributes:
        scaler: Which.
        before: Scale before.
        after: Scale after.
        given: Whether the caller chose it.
        failed: Whether it raised, because nothing was unscaled since the last one.
    """

    scaler: int
    before: float
    after: float
    given: bool = False
    failed: bool = False


@written
class Step(Event):
    """`Optimizer.step`.

    Attributes:
        optimizer: Which.
        params: Parameters that had a gradient.
        lrs: Rate of each group.
        found_inf: What a fused optimizer was told; 1 makes it a no-op.
        scaler: The scaler that called it.
        had_closure: Whether it runs the backward itself.
        grads_finite: Whether all gradients were finite; None where it was not looked at.
        made_by_hand: Whether there were gradients that are not 0 and that no backward had made.
    """

    optimizer: int
    params: frozenset[int]
    lrs: tuple[float, ...]
    found_inf: float = 0.0
    scaler: int | None = None
    had_closure: bool = False
    grads_finite: bool | None = None
    made_by_hand: bool = False


@written
class Tick(Event):
    """A step of a schedule: its counter after it."""

    schedule: int
    count: int


@written
class Epoch(Event):
    """A loader began, or with `is_over` ended, a pass; `length` in batches, -1 if unknown."""

    loader: int
    length: int
    is_over: bool


@written
class Collective(Event):
    """A collective that the loop called itself; `params` where it was given their gradients."""

    name: str
    params: frozenset[int]


@written
class Recompute(Event):
    """A recomputed block that drew random numbers without keeping the random state."""

    drew: bool


@written
class HostRead(Event):
    """`.item()` and its like on a tensor with a graph, which waits for the device."""

    on_device: bool


@written
class Loaded(Event):
    """State of an "optimizer", a "schedule", a "scaler", ...: with `is_empty`, it then had none."""

    what: str
    is_empty: bool = False


@written
class Saved(Event):
    """State was asked of an "optimizer", a "schedule", a "scaler", or written to a "file"."""

    what: str


@written
class Cast(Event):
    """A module was cast to a type of 16 bits."""

    dtype: str


@written
class Replaced(Event):
    """Values of a gradient that are not finite were replaced; `had_some` if there were any."""

    params: frozenset[int]
    had_some: bool


@written
class Asked(Event):
    """Whether a loss, or the gradients of `params`, are finite was asked, of some that are not."""

    params: frozenset[int] = NOTHING


@written
class Recording:
    """What one process did.

    Attributes:
        events: In order.
        rank: Of this process.
        world_size: Number of processes that train together.
        is_complete: Whether it was watched to its end, and ended without an error.
        started: Seconds since the epoch, to tell launches apart.
        num_unmeasured: Looks that failed.
        num_updates: Steps that were watched.
    """

    events: list[Event]
    rank: int = 0
    world_size: int = 1
    is_complete: bool = True
    started: float = 0.0
    num_unmeasured: int = 0
    num_updates: int = 0
