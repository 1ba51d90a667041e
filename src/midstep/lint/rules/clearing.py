"""MS109, MS111 and MS605: gradients that are never cleared, or at the wrong moment."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..conditions import Topic
from ..loops import Update
from ..sameness import covers
from ..trace import Act, Event, Run, walk
from ..values import Function, Module, Optimizer, Params
from .report import Report, at, positions

__all__ = ["CLEARING"]


def never_cleared(update: Update) -> Iterator[Report]:
    """MS109: no clearing in the loop that steps.

    Args:
        update: One optimizer in one place.
    """
    place = update.place
    loop = place.loop
    if loop is None or place.is_opaque() or not update.feeding:
        return
    if not all(_is_of_another(update, event) for event in place.events(Act.ZERO)):
        return
    if any(isinstance(step.by, Function) for step in update.steps):
        return
    if any(made.subject is update.optimizer for made in place.events(Act.MAKE)):
        return  # each pass makes its own
    if loop.is_called:
        if any(isinstance(node, Event) and node.act is Act.ZERO for node in walk(place.root.block)):
            return
        if not _is_whole_step(loop.node):
            return
    elif any(_called_back(outer.node) for outer in (loop, *place.outer)):
        return
    step = update.steps[0]
    is_once = any(
        isinstance(n, Event) and n.act is Act.ZERO and not _is_of_another(update, n)
        for n in walk(place.root.block)
    )
    where = "only outside this loop" if is_once else "nowhere"
    yield Report(
        "MS109",
        step.node,
        f"{at(step)} uses gradients that are cleared {where}.",
    )


def _is_of_another(update: Update, clearing: Event) -> bool:
    """Whether another optimizer clears, whose parameters are surely not those of this one."""
    mine, other = update.optimizer, clearing.subject
    if not isinstance(mine, Optimizer) or not isinstance(other, Optimizer) or mine is other:
        return False
    if not isinstance(mine.params, Params) or not isinstance(other.params, Params):
        return False
    pairs = [(one, two) for one in mine.params.modules for two in other.params.modules]
    # Made in sight: what a function gave back may hold the other.
    are_named = all(
        isinstance(one, Module) and one.node is not None for pair in pairs for one in pair
    )
    return are_named and not any(covers(one, two) or covers(two, one) for one, two in pairs)


def _is_whole_step(node: ast.AST) -> bool:
    """A function whose caller may clear is not judged."""
    del node
    return False


def _called_back(node: ast.AST) -> bool:
    """Whether a loop lets somebody else clear: it yields, or makes the gradients anew."""
    for part in ast.walk(node):
        if isinstance(part, ast.Yield | ast.YieldFrom):
            return True
        if isinstance(part, ast.Call):
            name = part.func.attr if isinstance(part.func, ast.Attribute) else ""
            name = part.func.id if isinstance(part.func, ast.Name) else name
            if (
                ("zero" in name and name != "zero_grad")
                or "reset" in name
                or name in {"deepcopy", "grad"}
            ):
                return True
        is_grad = isinstance(part, ast.Attribute) and part.attr == "grad"
        if is_grad and isinstance(getattr(part, "ctx", None), ast.Store | ast.Del):
            return True
    return False


def cleared_before_step(update: Update) -> Iterator[Report]:
    """MS111: backward, clear, step.

    Args:
        update: One optimizer in one place.
    """
    if update.place.events(Act.FILL):
        return  # what is stepped is made by hand
    found: Event | None = None
    for run in update.step_runs():
        event = _erased(update, run)
        if event is None:
            return
        found = found or event
    if found is not None:
        yield Report(
            "MS111",
            found.node,
            f"{at(found)} runs after the last backward and before {at(update.steps[0])}.",
        )


def _erased(update: Update, run: Run) -> Event | None:
    for step in update.steps_in(run):
        backwards = [n for n in positions(run, Act.BACKWARD) if n < step]
        if not backwards:
            continue
        between = run.events[backwards[-1] + 1 : step]
        for event in reversed(between):
            if event.act is Act.UNKNOWN:
                break  # it may run a backward of its own
            if event.act is Act.ZERO and update.clears(event):
                return event
    return None


def refused_kept(update: Update) -> Iterator[Report]:
    """MS605: where a step is refused, nothing clears.

    Args:
        update: One optimizer in one place.
    """
    if update.place.is_opaque() or update.place.loop is None:
        return
    if update.place.loop.is_called:
        return
    for run in update.runs:
        finite = [atom for atom in run.answer if atom.topic is Topic.FINITE]
        if not finite or all(run.answer[atom] for atom in finite):
            continue
        if not positions(run, Act.BACKWARD) or update.steps_in(run):
            continue
        if run.exit is not None and run.exit.word in {"raise", "break"}:
            continue
        if any(event.act is Act.ZERO for event in run.events):
            continue
        event = _cleared_when_finite(update, run)
        if event is not None:
            yield Report(
                "MS605",
                event.node,
                f"{at(event)} runs only where the step is taken; where it is refused because a "
                "value is not finite, the gradients stay.",
            )
            return


def _cleared_when_finite(update: Update, refused: Run) -> Event | None:
    for run in update.step_runs():
        same = all(
            answer == refused.answer.get(atom)
            for atom, answer in run.answer.items()
            if atom.topic is not Topic.FINITE
        )
        if not same:
            continue
        step = update.steps_in(run)[-1]
        for event in run.events[step + 1 :]:
            if event.act is Act.ZERO and update.clears(event):
                return event
    return None


CLEARING = (never_cleared, cleared_before_step, refused_kept)
