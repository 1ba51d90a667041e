"""The recorder: what the parts that watch torch share, and the backward itself."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..events import (
    Backward,
    Clear,
    Clip,
    Event,
    NewOptimizer,
    Orphan,
    Place,
    Recording,
    Rescaled,
    Term,
)
from .graphs import Graphs, Shadows
from .losses import FAILURES, find_leaves, number
from .parameters import Numbers, Parameters, Watched, params_of, ratio_of, shape_of
from .patches import Patches
from .places import Places

__all__ = ["Recorder"]

CLOSE_LOOKS = 48  # backwards that are looked at closely at first, whatever it costs
SHARE = 0.02  # of the time of the run that close looks may take from then on
MAX_EVENTS = 200_000  # then the recorder lets go

_ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Recorder:
    """Watches torch from outside and writes down what the loop does.

    Use `recorder.watching.watch`, which installs every part and restores torch afterwards.

    Args:
        places: Says whose code a line is.
        max_updates: Let go after so many steps; None to watch to the end.
    """

    def __init__(self, places: Places, max_updates: int | None = None) -> None:
        self.places = places
        self.patches = Patches()
        self.parameters = Parameters()
        self.optimizers, self.scalers, self.others = Numbers(), Numbers(), Numbers()
        self.made: dict[int, tuple[weakref.ref[Any], Place | None, int]] = {}
        self.events: list[Event] = []
        self.is_watching = False
        self._thread: dict[str, threading.Thread] = {}  # the one that trains, once there is one
        self.inside: list[int] = []  # optimizers whose closure is running
        self.scaled: tuple[int, float] | None = None  # the scaler of the next backward, its scale
        self._loss: weakref.ref[Tensor] | None = None
        self.scaler_now: int | None = None  # the scaler whose step is running
        self.depth = 0  # backwards that are running; one may call another
        self.syncs: Callable[[], bool | None] = lambda: None
        self.batch_norms: dict[int, Place] = {}
        self.num_updates = 0
        self.before_step = 0  # number of events when the last step began
        self.num_unmeasured = 0
        self.letting_go: list[Callable[[], None]] = []
        self.started = time.time()
        self._max_updates = max_updates
        self._dirty: set[int] = set()  # parameters with a gradient that was not cleared since
        self._num_close = 0
        self._spent = 0.0
        self._clock = time.perf_counter()
        self._shadows = Shadows()
        self._graphs = Graphs()
        self._rank = (0, 1)

    # What the parts use.

    def add(self, event: Event) -> None:
        """Write an event down."""
        self.events.append(event)
        if len(self.events) >= MAX_EVENTS:
            self.let_go()

    def let_go(self) -> None:
        """Stop watching; the patches stay as plain passages until they are restored."""
        self.is_watching = False
        for leave in self.letting_go:
            leave()
        self.letting_go.clear()
        self._shadows.end()
        self.parameters.forget()
        self.parameters.watched.clear()

    def here(self) -> Place | None:
        """Return the user's line that is running."""
        return self.places.here()

    @property
    def is_active(self) -> bool:
        """Whether this thread is watched: the first that trains, and of those made before, all."""
        thread = self._thread.get("") if self.is_watching else None
        return self.is_watching and (thread is None or thread.ident == threading.get_ident())

    def adopt(self) -> None:
        """Watch the thread that runs, if no other that trains is alive."""
        thread = self._thread.get("")
        if thread is not None and not thread.is_alive():
            del self._thread[""]
        self._thread.setdefault("", threading.current_thread())

    @property
    def is_close(self) -> bool:
        """Whether values are looked at: at first always, later within a share of the time."""
        if self._num_close < CLOSE_LOOKS:
            return True
        return self._spent < SHARE * (time.perf_counter() - self._clock)

    def remember(self, thing: Any) -> None:
        """Remember where something was made."""
        key, made = id(thing), self.made

        def forget(ref: weakref.ref[Any]) -> None:
            if key in made and made[key][0] is ref:
                del made[key]

        made[key] = (weakref.ref(thing, forget), self.here(), len(self.events))

    def made_at(self, thing: Any) -> Place | None:
        """Return where something was made, if that was seen."""
        entry = self.made.get(id(thing))
        return None if entry is None else entry[1]

    def know(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer, and read its parameters when it is new."""
        identity = id(optimizer)
        watched = self.parameters.watched.get(identity)
        if watched is not None and watched.ref() is optimizer:
            return watched.number
        params, mine = params_of(optimizer), self.optimizers.of(optimizer)
        of = self.parameters.numbers.of
        keys = self.parameters.intern(map(of, params))
        self.parameters.watched[identity] = Watched(
            mine, weakref.ref(optimizer), shape_of(optimizer), keys
        )
        self.parameters.refresh()
        self.parameters.reread()
        defaults = optimizer.defaults
        self.add(
            NewOptimizer(
                self.made_at(optimizer) or self.here(),
                mine,
                type(optimizer).__name__,
                keys,
                len(params),
                {of(p): tuple(p.shape) for p in params},
                takes_fused="fused" in defaults and not defaults["fused"],
                is_sharded=any(is_sharded(p) for p in params),
                frozen=frozenset(of(p) for p in params if not p.requires_grad),
            )
        )
        return mine

    def keys_of_module(self, module: torch.nn.Module) -> frozenset[int]:
        """Return the numbers of the parameters of a module that an optimizer holds."""
        return self.parameters.keys_of(module.parameters())

    def keys_of_grads(self, tensors: list[Any]) -> frozenset[int]:
        """Return the numbers of the parameters whose gradients these are."""
        found = map(self.parameters.of_grad, tensors)
        return self.parameters.intern(key for key in found if key is not None)

    def is_loss(self, tensor: Tensor) -> bool:
        """Whether a number is the loss of the last backward, detached."""
        loss = self._loss() if self._loss is not None else None
        return loss is not None and loss.data_ptr() == tensor.data_ptr()

    def count_update(self) -> None:
        """Count a step, and let go after enough of them."""
        self.num_updates += 1
        self.note_rank()
        if self._max_updates is not None and self.num_updates >= self._max_updates:
            self.let_go()

    def forget_looks(self) -> None:
        """Forget the norms that an optimizer took for itself in the step that ends."""
        during = self.events[self.before_step :]
        kept = [event for event in during if not (isinstance(event, Clip) and event.is_look)]
        self.events[self.before_step :] = kept

    def has_new(self, keys: frozenset[int]) -> bool:
        """Whether a backward gave some of these parameters a gradient since it was cleared."""
        return not self._dirty.isdisjoint(keys)

    # Looks.

    def look(self) -> None:
        """Find out what was done to the gradients by hand since the last look."""
        parameters = self.parameters
        parameters.refresh()
        marks = parameters.look()
        cleared = [key for key in self._dirty if marks.get(key, 0) is None]
        if cleared:
            self.cleared(parameters.intern(cleared), "hand", None)
        try:
            if self.is_close:
                self._look_closely(marks)
        except FAILURES:
            self.num_unmeasured += 1
        parameters.marks = marks

    def _look_closely(self, marks: dict[int, Any]) -> None:
        parameters = self.parameters
        for watched in list(parameters.watched.values()):
            ratios = []
            for key in watched.probes:
                before, mark = parameters.samples.get(key), marks.get(key)
                if before is None or mark is None or mark == parameters.marks.get(key):
                    continue
                after = parameters.sample(key)
                if after is not None:
                    tolerance = _ROUNDING.get(parameters.param(key).dtype, 1e-4)
                    ratios.append(ratio_of(before, after, tolerance))
                    parameters.samples[key] = after
            known = [ratio for ratio in ratios if not math.isnan(ratio)]
            if not ratios:
                continue
            changed = parameters.intern(key for key in watched.keys if marks.get(key) is not None)
            if known and not any(known):
                self.cleared(changed, "hand", None)
            elif known and max(known) - min(known) <= 1e-2 * abs(max(known)):
                if abs(known[0] - 1.0) > 1e-4:
                    self.add(Rescaled(None, changed, known[0]))
            else:
                self.add(Rescaled(None, changed, math.nan))

    def settle(self) -> None:
        """Take what is in the gradients now as known: a watched call has changed them."""
        self.parameters.marks = self.parameters.look()
        try:
            if self.is_close:
                self.parameters.take_samples()
        except FAILURES:
            self.num_unmeasured += 1

    def cleared(self, keys: frozenset[int], by: str, place: Place | None) -> None:
        """Write down that gradients were cleared."""
        self._dirty -= keys
        self._shadows.clear(keys)
        for key in keys & self.parameters.samples.keys():
            del self.parameters.samples[key]
        self.add(Clear(place, keys, by))

    # Backward.

    def backward(self, run: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward and write down what it did."""
        self.adopt()
        if not self.is_active:
            return run(tensors, *args, **kwargs)
        if self.depth or not kwargs.get("accumulate_grad"):
            self.depth += 1
            try:
                return run(tensors, *args, **kwargs)
            finally:
                self.depth -= 1
        began = time.perf_counter()
        route = self.places.route()
        event = Backward(route[0] if route else None, route=route)
        event.inside = self.inside[-1] if self.inside else None
        handles = self._before(event, list(tensors))
        middle = time.perf_counter()
        self.depth += 1
        try:
            result = run(tensors, *args, **kwargs)
        finally:
            self.depth -= 1
            for handle in handles:
                handle.remove()
        end = time.perf_counter()
        if self.is_active:
            self._after(event)
        self._num_close += 1
        self._spent += time.perf_counter() - end + middle - began
        return result

    def _before(self, event: Backward, roots: list[Tensor]) -> list[Any]:
        event.syncs = self.syncs()
        if self.scaled is not None:
            event.scaler, event.scale = self.scaled
            self.scaled = None
        event.batch_norms = tuple(self.batch_norms.values())
        self.batch_norms.clear()
        handles: list[Any] = []
        try:
            self.look()
            if not self.is_close:
                return handles
            if len(roots) == 1 and roots[0].numel() == 1:
                event.loss = number(roots[0])
                self._loss = weakref.ref(roots[0])
            leaves = find_leaves(roots)
            event.terms = tuple(leaf.term for leaf in leaves)
            handles.extend(leaf.node.register_prehook(_weigh(leaf.term)) for leaf in leaves)
            self._watch_graph(event, roots)
            self._shadows.begin(self.parameters)
        except FAILURES:
            self.num_unmeasured += 1
        return handles

    def _after(self, event: Backward) -> None:
        parameters = self.parameters
        before, after = parameters.marks, parameters.look()
        touched = parameters.intern(
            key for key, mark in after.items() if mark is not None and mark != before.get(key)
        )
        event.params = touched
        self._dirty |= touched
        parameters.marks = after
        try:
            if self.is_close:
                parameters.choose_probes(touched)
                parameters.take_samples(touched)
                self._shadows.compare(self.parameters, event)
        except FAILURES:
            self.num_unmeasured += 1
        self.add(event)

    def _watch_graph(self, event: Backward, roots: list[Tensor]) -> None:
        """Find parameters without optimizer, and losses whose graphs are kept."""
        event.num_kept = self._graphs.keep(roots)
        event.orphans = tuple(
            Orphan(
                self.parameters.numbers.of(p),
                tuple(p.shape),
                self.made_at(p),
                self.made[id(p)][2] if id(p) in self.made else -1,
            )
            for p in self._graphs.parameters(event.place, roots)
            if self.parameters.numbers.find(p) not in self.parameters.marks
        )

    # The end.

    def recording(self, *, is_complete: bool) -> Recording:
        """Return what was written down.

        Args:
            is_complete: Whether the loop came to its own end.
        """
        self.note_rank()
        return Recording(
            self.events,
            *self._rank,
            is_complete and self.is_watching,
            self.started,
            self.num_unmeasured,
            self.num_updates,
        )

    def note_rank(self) -> None:
        """Remember which rank this is, while there is a process group to ask."""
        rank = ranks()
        if rank[1] > 1:
            self._rank = rank

    def begin_anew(self) -> None:
        """Forget what the parent of this process did: it writes that down itself."""
        self.events = [e for e in self.events if isinstance(e, NewOptimizer)]
        self.started = time.time()
        self.num_updates = 0


def _weigh(term: Term) -> Callable[[tuple[Tensor | None, ...]], None]:
    def hook(grads: tuple[Tensor | None, ...]) -> None:
        grad = grads[0]
        if grad is not None and grad.numel() == 1:
            weight = float(grad.detach())
            term.weight = weight if math.isnan(term.weight) else term.weight + weight

    return hook


def is_sharded(p: Any) -> bool:
    """Whether a parameter is one rank's part of a larger one."""
    return bool(getattr(p, "_fsdp_flattened", False)) or hasattr(p, "to_local")


def ranks() -> tuple[int, int]:
    """Return the rank of this process and how many there are."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
