"""MS401 to MS405: when the schedule ticks, and in which unit its length is counted."""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Iterator

from ..conditions import Topic
from ..evaluator import text_of
from ..loops import Update
from ..sameness import same
from ..trace import Act, Event, Loop, Run, walk
from ..values import Const, Length, Scaler, Schedule, Unknown, Value, key_of
from ..values import Iterator as Iterates
from .dividing import numbers
from .report import Report, at, positions, words

__all__ = ["CLOCKS"]

RANKS = re.compile(r"world|process|rank|gpu|replica|device", re.IGNORECASE)
# Schedules whose length is the whole training.
ENDS = {"CosineAnnealingLR", "OneCycleLR", "PolynomialLR"}


def _is_mine(update: Update, event: Event) -> bool:
    """Whether a schedule moves the rate of this optimizer."""
    schedule = event.subject
    if isinstance(schedule, Schedule):
        if schedule.class_name == "ReduceLROnPlateau":
            return False
        if schedule.optimizer is not None and not isinstance(schedule.optimizer, Unknown):
            return same(schedule.optimizer, update.optimizer)
    return update.is_only


def _ticks(update: Update, run: Run) -> list[int]:
    return [
        n
        for n in positions(run, Act.TICK)
        if not run.events[n].calm and _is_mine(update, run.events[n])
    ]


def before_optimizer(update: Update) -> Iterator[Report]:
    """MS401: tick, then step.

    Args:
        update: One optimizer in one place.
    """
    if update.is_accelerated:
        return
    found: Event | None = None
    for run in update.step_runs():
        ticks, step = _ticks(update, run), update.steps_in(run)[0]
        feeding = [n for n in positions(run, Act.BACKWARD) if n < step]
        if not ticks or not feeding:
            continue
        schedule = run.events[ticks[0]].subject
        if isinstance(schedule, Unknown) and schedule.class_name:
            return  # of a class that is not in sight, which may be made to tick first
        if ticks[0] > step:
            return
        found = found or run.events[ticks[0]]
    if found is not None:
        yield Report("MS401", found.node, f"{at(found)} runs before {at(update.steps[0])}.")
        return
    yield from _at_pass_begin(update)


def _at_pass_begin(update: Update) -> Iterator[Report]:
    """The form of torch before 1.1: the schedule first, then the pass over the data."""
    place = update.place
    if not place.outer or not place.siblings or place.events(Act.TICK):
        return
    outer = {id(loop.body) for loop in place.outer}
    before: list[Event] = []
    for block, position in reversed(place.siblings):
        before += [n for n in block.nodes[:position] if isinstance(n, Event)]
        if id(block) in outer:
            break
    ticks = [e for e in before if e.act is Act.TICK and isinstance(e.subject, Schedule)]
    for event in ticks:
        schedule = event.subject
        assert isinstance(schedule, Schedule)
        is_torch = schedule.class_name[:1].isupper()
        if is_torch and not event.calm and not schedule.resumes and _is_mine(update, event):
            yield Report(
                "MS401",
                event.node,
                f"{at(event)} runs at the beginning of a pass, before its first "
                f"{at(update.steps[0])}.",
            )
            return


def every_microbatch(update: Update) -> Iterator[Report]:
    """MS402: a tick in a pass that does not step.

    Args:
        update: One optimizer in one place.
    """
    if not update.is_flat or update.gate is None or not update.gate[1]:
        return
    inside = [run for run in update.inside_runs() if not _refuses(run)]
    ticks = [_ticks(update, run) for run in inside]
    if not inside or not all(ticks):
        return
    event = inside[0].events[ticks[0][0]]
    if _counts_microbatches(event.subject, update.length):
        return
    yield Report(
        "MS402",
        event.node,
        f"{at(event)} runs with every microbatch, and the step once in `{update.length or 'k'}` of "
        "them.",
    )


def _refuses(run: Run) -> bool:
    topics = {Topic.FINITE, Topic.STEPPED}
    return any(atom.topic in topics and not yes for atom, yes in run.answer.items())


def _counts_microbatches(schedule: Value | None, length: str) -> bool:
    """Whether the length of a schedule may be counted in microbatches."""
    if not isinstance(schedule, Schedule):
        return False
    if schedule.class_name == "LambdaLR":
        words = text_of(schedule.node)
        return "len(" in words and not (length and length in words)
    if not schedule.horizon:
        return schedule.class_name[:1].islower()  # of a function, which was told in its own way
    text = " ".join(text_of(node) for node in schedule.horizon)
    if "/" in text or (length and length in text):
        return False
    if "len(" in text:
        return True
    return not all(isinstance(value, Const) for value in schedule.horizon_values)


def on_skipped_step(update: Update) -> Iterator[Report]:
    """MS403: `scaler.step`, then a tick that does not ask whether the step was taken.

    Args:
        update: One optimizer in one place.
    """
    found: Event | None = None
    for run in update.runs:
        ticks = _ticks(update, run)
        if _refuses(run) and not ticks:
            return
        steps = [n for n in update.steps_in(run) if _through_scaler(run.events[n])]
        if steps and any(tick > steps[0] for tick in ticks):
            found = found or run.events[next(tick for tick in ticks if tick > steps[0])]
    if found is not None:
        yield Report(
            "MS403",
            found.node,
            f"{at(found)} follows a step that the scaler skips when a gradient is not finite, and "
            "does not ask whether it did.",
        )


def _through_scaler(step: Event) -> bool:
    if isinstance(step.by, Scaler):
        return step.by.enabled
    return step.by is not None and "scaler" in key_of(step.by).lower()


def several_times(update: Update) -> Iterator[Report]:
    """MS404: several ticks for one step.

    Args:
        update: One optimizer in one place.
    """
    if update.is_accelerated:
        return
    for node in update.place.nodes():
        if not isinstance(node, Loop) or not isinstance(node.iterator, Iterates):
            continue
        words_of_length = key_of(node.iterator.length)
        if words_of_length == "1":
            continue
        events = [part for part in walk(node.body) if isinstance(part, Event)]
        ticks = [e for e in events if e.act is Act.TICK and _is_mine(update, e)]
        if not ticks or any(event.act is Act.STEP for event in events):
            continue
        over = text_of(node.node.iter) if isinstance(node.node, ast.For) else ""
        if RANKS.search(over) and not _multiplied(ticks[0].subject, node.node):
            yield Report(
                "MS404",
                ticks[0].node,
                f"{at(ticks[0])} runs {_times(words_of_length)} for one step.",
            )
            return
    yield from _two_places(update)


def _times(length: str) -> str:
    return f"`{length}` times" if length and not length.startswith("<") else "several times"


def _multiplied(schedule: Value | None, loop: ast.AST) -> bool:
    """Whether the length of the schedule was, or may have been, multiplied by the same number."""
    horizon = schedule.horizon if isinstance(schedule, Schedule) else ()
    if not horizon:
        return True
    text = " ".join(text_of(node) for node in horizon)
    iterable = loop.iter if isinstance(loop, ast.For) else loop
    return bool(RANKS.search(text)) and bool(RANKS.search(text_of(iterable)))


def _two_places(update: Update) -> Iterator[Report]:
    alone = set(_ticks_alone(update))
    for run in update.step_runs():
        ticks = [e for n in _ticks(update, run) if (e := run.events[n]).node not in alone]
        for first, second in itertools.pairwise(ticks):
            between = run.events[run.events.index(first) : run.events.index(second)]
            if any(event.act is Act.STEP for event in between):
                continue
            if first.node is not second.node and same(first.subject, second.subject):
                yield Report(
                    "MS404",
                    second.node,
                    f"{at(second)} runs in one pass with {words(first.node)} of line {first.line}.",
                )
                return


def _ticks_alone(update: Update) -> Iterator[ast.AST]:
    """Ticks of a loop that steps nothing: the schedule is played, to draw it or to catch up."""
    for loop in update.place.nodes():
        if isinstance(loop, Loop):
            events = [node for node in walk(loop.body) if isinstance(node, Event)]
            if not any(event.act is Act.STEP for event in events):
                yield from (event.node for event in events if event.act is Act.TICK)


def wrong_unit(update: Update) -> Iterator[Report]:
    """MS405: a length in passes that ticks with batches, or the other way round.

    Args:
        update: One optimizer in one place.
    """
    place = update.place
    for event in place.events(Act.TICK):
        schedule = event.subject
        if not isinstance(schedule, Schedule) or schedule.class_name not in ENDS:
            continue
        for outer in place.outer:
            length = getattr(outer.iterator, "length", None)
            if length is None or not _is_mine(update, event):
                continue
            for value in schedule.horizon_values:
                if key_of(value) == key_of(length) and not isinstance(length, Length):
                    yield Report(
                        "MS405",
                        event.node,
                        f"{at(event)} runs with every batch, and {words(schedule.node)} counts "
                        f"`{key_of(length)}` passes.",
                    )
                    return
    yield from _never_ends(update)


def _never_ends(update: Update) -> Iterator[Report]:
    """A length in microbatches that ticks once a window, or once a pass."""
    for event, unit in _late_ticks(update):
        schedule = event.subject
        if not isinstance(schedule, Schedule) or schedule.class_name not in ENDS:
            continue
        if schedule.optimizer is not None and not same(schedule.optimizer, update.optimizer):
            continue
        # A name stands for the product it was given.
        values = [key_of(value) for value in schedule.horizon_values if isinstance(value, Unknown)]
        text = " ".join([*map(text_of, schedule.horizon), *values])
        divided = "/" in text or "ceil" in text or (update.length and update.length in text)
        if (re.search(r"\blen\(", text) and not divided) or _is_number_of_batches(update, schedule):
            yield Report(
                "MS405",
                event.node,
                f"{at(event)} runs once {unit}, and {words(schedule.node)} counts batches.",
            )
            return


def _is_number_of_batches(update: Update, schedule: Schedule) -> bool:
    """Whether the length is a number: that of all batches of all passes, where both are known."""
    length, batches = numbers(update)
    passes = [getattr(outer.iterator, "length", None) for outer in update.place.outer]
    known = [value.value for value in passes if isinstance(value, Const)]
    given = [value.value for value in schedule.horizon_values if isinstance(value, Const)]
    if not length or not batches or len(known) != len(passes) or len(given) != 1:
        return False
    return 1 < length < batches and given[0] == math.prod([batches, *known])


def _late_ticks(update: Update) -> Iterator[tuple[Event, str]]:
    if update.is_flat and update.gate is not None:
        inside = [n for run in update.inside_runs() for n in positions(run, Act.TICK)]
        if not inside:
            for event in update.place.events(Act.TICK):
                yield event, f"in `{update.length or 'k'}` batches"
    if update.place.outer and not update.place.events(Act.TICK):
        body = update.place.outer[-1].body
        for node in body.nodes:
            if isinstance(node, Event) and node.act is Act.TICK and not node.calm:
                yield node, "a pass"


CLOCKS = (before_optimizer, every_microbatch, on_skipped_step, several_times, wrong_unit)
