"""MS602 to MS604: values that are not finite, hidden or replaced."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..conditions import Topic, atoms_of, holds
from ..evaluator import text_of
from ..loops import Update
from ..trace import Act, Attempt, Branch, Event, Exit, walk
from .hiding import left_out_numbers
from .report import Edit, Report, at, positions, words

__all__ = ["NON_FINITE"]

LOGS = {Act.READ, Act.KEEP, Act.REPORT}


def hidden(update: Update) -> Iterator[Report]:
    """MS603: a loss is logged only where it is finite, and trained on in any case.

    Args:
        update: One optimizer in one place.
    """
    if not _always_steps(update):
        return
    for node in update.place.nodes():
        if isinstance(node, Branch) and (event := _logged_if_finite(node)) is not None:
            test = getattr(node.node, "test", node.node)
            yield Report(
                "MS603",
                event.node,
                f"{at(event)} is left out where {words(test)} does not hold, and the step is taken "
                "all the same.",
            )
            return
    for place, asked in left_out_numbers(update):
        yield Report(
            "MS603",
            place,
            f"{words(place)} leaves a loss out of the log by {words(asked)}, and the step is taken "
            "all the same.",
        )
        return
    for run in update.step_runs():
        backwards = positions(run, Act.BACKWARD)
        for number in positions(run, Act.REPORT):
            if backwards and number > backwards[-1]:
                event = run.events[number]
                yield Report(
                    "MS603",
                    event.node,
                    f"{at(event)} hides values that are not finite from the log, and the step is "
                    "taken all the same.",
                )
                return


def _always_steps(update: Update) -> bool:
    """Whether no step is left out because something is not finite."""
    if not update.step_runs():
        return False
    for run in update.runs:
        refused = any(a.topic is Topic.FINITE and not yes for a, yes in run.answer.items())
        if refused and run.exit is None and not update.steps_in(run) and update.gate is None:
            return False
        if refused and run.exit is not None:
            return False
    return True


def _logged_if_finite(branch: Branch) -> Event | None:
    atoms = set(atoms_of(branch.formula))
    if len(atoms) != 1 or next(iter(atoms)).topic is not Topic.FINITE:
        return None
    atom = next(iter(atoms))
    if not holds(branch.formula, {atom: True}):
        return None
    if branch.orelse.nodes or getattr(branch.node, "orelse", None):
        return None
    events = [node for node in walk(branch.body) if isinstance(node, Event)]
    if any(isinstance(node, Exit) for node in walk(branch.body)):
        return None
    if not events or any(event.act not in LOGS for event in events):
        return None
    return next((event for event in events), None)


def replaced(update: Update) -> Iterator[Report]:
    """MS604: `nan_to_num_` on gradients, then a step.

    Args:
        update: One optimizer in one place.
    """
    for run in update.step_runs():
        step = update.steps_in(run)[-1]
        for number in positions(run, Act.REPLACE):
            if number < step:
                event = run.events[number]
                yield Report(
                    "MS604",
                    event.node,
                    f"{at(event)} puts numbers in place of gradients that are not finite, and "
                    f"{at(update.steps[0])} uses them.",
                )
                return


def not_raised(update: Update) -> Iterator[Report]:
    """MS602: an `except` around a clip that was not told to raise.

    Args:
        update: One optimizer in one place.
    """
    for node in update.place.nodes():
        if not isinstance(node, Attempt):
            continue
        events = [n for n in walk(node.body) if isinstance(n, Event)]
        heavy = {Act.BACKWARD, Act.FORWARD, Act.UNKNOWN}
        clips = [event for event in events if event.act is Act.CLIP]
        if len(clips) != 1 or any(event.act in heavy for event in events):
            continue
        # A plain step behind the clip is what the error was to prevent; a scaler's raises, too.
        steps = [event for event in events if event.act is Act.STEP]
        if any(e.by is not None or events.index(e) < events.index(clips[0]) for e in steps):
            continue
        call = clips[0].node
        if (
            not isinstance(call, ast.Call)
            or _raises(call)
            or not _skips(node, has_step=bool(steps))
        ):
            continue
        yield Report(
            "MS602",
            call,
            f"{words(call)} raises for a norm that is not finite only with "
            "`error_if_nonfinite=True`, which is not passed.",
            edits=(Edit(call, _with_error(call)),),
        )


def _raises(call: ast.Call) -> bool:
    is_value_clip = text_of(call.func).endswith("value_")
    return (
        is_value_clip
        or any(keyword.arg in {"error_if_nonfinite", None} for keyword in call.keywords)
        or len(call.args) > 3
    )


def _skips(node: Attempt, *, has_step: bool) -> bool:
    for handler, block in node.handlers:
        kinds = text_of(handler.type) if handler.type is not None else "Exception"
        if not any(kind in kinds for kind in ("RuntimeError", "Exception", "ValueError")):
            continue
        if any(isinstance(n, Exit) and n.word in {"continue", "return"} for n in walk(block)):
            return True
        if any(isinstance(n, Event) and n.act is Act.ZERO for n in walk(block)):
            return True
        if has_step and not any(isinstance(n, Exit) for n in walk(block)):
            return True
    return False


def _with_error(call: ast.Call) -> str:
    return f"{text_of(call)[:-1]}, error_if_nonfinite=True)"


NON_FINITE = (not_raised, hidden, replaced)
