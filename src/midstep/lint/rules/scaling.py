"""MS301 to MS306: the protocol of the gradient scaler."""

from __future__ import annotations

from collections.abc import Iterator

from ..conditions import Topic
from ..loops import Update
from ..sameness import same
from ..trace import Act, Event, Loop, Run, walk
from ..values import Params, Scaler, Value, key_of
from .dividing import accumulates
from .report import Report, at, positions

__all__ = ["SCALING"]


def _scaler_of(update: Update) -> Value | None:
    """The scaler through which this optimizer steps."""
    for step in update.steps:
        if isinstance(step.by, Scaler):
            return step.by if step.by.enabled else None
        if step.by is not None and "scaler" in key_of(step.by).lower():
            return step.by
    return None


def unscaled_twice(update: Update) -> Iterator[Report]:
    """MS301: two `unscale_` of one optimizer, and no `update` in between.

    Args:
        update: One optimizer in one place.
    """
    for run in update.runs:
        last: Event | None = None
        for event in run.events:
            if event.act is Act.UPDATE:
                last = None
            elif event.act is Act.UNSCALE and same(event.subject, update.optimizer):
                if last is not None and last.node is not event.node:
                    yield Report(
                        "MS301",
                        event.node,
                        f"{at(event)} follows {at(last)}, and no `update` stands between them.",
                    )
                    return
                last = event
    if not update.is_flat or _scaler_of(update) is None:
        return
    inside = [run for run in update.inside_runs() if not _refuses(run)]
    for run in inside:
        unscales = [
            event
            for event in run.events
            if event.act is Act.UNSCALE and same(event.subject, update.optimizer)
        ]
        if unscales and not positions(run, Act.UPDATE):
            yield Report(
                "MS301",
                unscales[0].node,
                f"{at(unscales[0])} runs with every microbatch, and `update` once in "
                f"`{update.length or 'k'}` of them.",
            )
            return


def _refuses(run: Run) -> bool:
    return any(atom.topic is Topic.FINITE and not yes for atom, yes in run.answer.items())


def changed_in_window(update: Update) -> Iterator[Report]:
    """MS302: `update` with every microbatch.

    Args:
        update: One optimizer in one place.
    """
    if not update.is_flat or _scaler_of(update) is None or not update.is_only:
        return
    inside = [run for run in update.inside_runs() if not _refuses(run)]
    if inside and all(positions(run, Act.UPDATE) for run in inside):
        event = inside[0].events[positions(inside[0], Act.UPDATE)[0]]
        yield Report(
            "MS302",
            event.node,
            f"{at(event)} runs with every microbatch, and the step once in "
            f"`{update.length or 'k'}` of them.",
        )


def not_updated(update: Update) -> Iterator[Report]:
    """MS303: a way through the loop without `update`.

    Args:
        update: One optimizer in one place.
    """
    scaler = _scaler_of(update)
    if scaler is None or update.place.is_opaque():
        return
    everywhere = [
        node
        for node in walk(update.place.root.block)
        if isinstance(node, Event) and node.act is Act.UPDATE
    ]
    if not everywhere:
        loop = update.place.loop
        if loop is not None and not loop.is_called:
            step = update.steps[0]
            yield Report("MS303", step.node, f"`{key_of(scaler)}.update()` is called nowhere.")
        return
    if not any(positions(run, Act.UPDATE) for run in update.runs):
        return
    for run in update.runs:
        unscales = [n for n in positions(run, Act.UNSCALE) if same(run.events[n].by, scaler)]
        if not unscales or any(n > unscales[0] for n in positions(run, Act.UPDATE)):
            continue
        if run.exit is not None and run.exit.word in {"raise", "break"}:
            continue
        left = run.exit is not None and run.exit.word in {"continue", "return"}
        if _refuses(run) or left:
            event = run.events[unscales[0]]
            how = "the pass is left" if left else "a value is not finite"
            yield Report(
                "MS303",
                event.node,
                f"{at(event)} is not followed by `update` where {how}"
                + (f" (line {run.exit.node.lineno})" if left and run.exit is not None else "")  # type: ignore[attr-defined]
                + ".",
            )
            return


def updated_often(update: Update) -> Iterator[Report]:
    """MS304: `update`, and then a step with gradients of the old scale.

    Args:
        update: One optimizer in one place.
    """
    scaler = _scaler_of(update)
    if scaler is None:
        return
    for run in update.runs:
        last: Event | None = None
        for number, event in enumerate(run.events):
            if event.act is Act.UPDATE and same(event.subject, scaler):
                if last is not None and not event.calm and _steps_between(run, last, number):
                    yield _often(event, "it was called before, and nothing was stepped since")
                    return
                last = event
            elif event.act is Act.BACKWARD:
                last = None
            elif last is not None and number in update.steps_in(run) and same(event.by, scaler):
                yield _often(last, f"{at(event)} follows with gradients of the scale before")
                return
    yield from _in_loop_of_optimizers(update, scaler)


def _steps_between(run: Run, last: Event, number: int) -> bool:
    first = run.events.index(last)
    return not any(event.act is Act.STEP for event in run.events[first:number])


def _often(event: Event, why: str) -> Report:
    return Report("MS304", event.node, f"{at(event)}: {why}.")


def _in_loop_of_optimizers(update: Update, scaler: Value) -> Iterator[Report]:
    """`for opt in optimizers: scaler.step(opt); scaler.update()`."""
    for node in update.place.nodes():
        if not isinstance(node, Loop):
            continue
        acts = [event.act for event in walk(node.body) if isinstance(event, Event)]
        if Act.STEP in acts and Act.UPDATE in acts and Act.BACKWARD not in acts:
            event = next(e for e in walk(node.body) if isinstance(e, Event) and e.act is Act.UPDATE)
            if same(event.subject, scaler):
                yield _often(event, "it is called once for each optimizer of the loop around it")
                return


def half_sums(update: Update) -> Iterator[Report]:
    """MS305: parameters in half precision, and gradients added up in them.

    Args:
        update: One optimizer in one place.
    """
    params = getattr(update.optimizer, "params", None)
    if not accumulates(update) or not isinstance(params, Params):
        return
    for node in walk(update.place.root.block):
        if not isinstance(node, Event) or node.act is not Act.HALF:
            continue
        if any(same(node.subject, module) for module in params.modules):
            yield Report(
                "MS305",
                node.node,
                f"{at(node)} gives parameters and gradients 16 bits, and "
                f"`{update.length or 'several'}` microbatches are added up in them.",
            )
            return


def stepped_scaled(update: Update) -> Iterator[Report]:
    """MS306: a scaled backward and a plain step.

    Args:
        update: One optimizer in one place.
    """
    place = update.place
    if place.events(Act.UNSCALE, Act.DIVIDE, Act.FILL, Act.UNKNOWN) or update.is_accelerated:
        return
    if any(step.by is not None for step in update.steps):
        return
    for run in update.step_runs():
        step = update.steps_in(run)[0]
        backwards = [n for n in positions(run, Act.BACKWARD) if n < step]
        by = run.events[backwards[-1]].by if backwards else None
        if not isinstance(by, Scaler) or not by.enabled:
            return
    if update.step_runs():
        yield Report(
            "MS306",
            update.steps[0].node,
            f"{at(update.steps[0])} is called on the optimizer, not through the scaler that scaled "
            "the loss.",
        )


SCALING = (
    unscaled_twice,
    changed_in_window,
    not_updated,
    updated_often,
    half_sums,
    stepped_scaled,
)
