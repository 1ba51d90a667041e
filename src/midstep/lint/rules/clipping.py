"""MS201 to MS209, MS211: when the gradient is clipped, and what of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..conditions import Topic
from ..evaluator import text_of
from ..loops import Update
from ..sameness import bare, covers
from ..trace import Act, Event, Run, walk
from ..values import (
    Accelerator,
    Const,
    Module,
    Optimizer,
    Params,
    Scaler,
    Value,
    Wrap,
    key_of,
)
from .dividing import accumulates
from .report import Edit, Report, at, clipped_by_hand, clips_of, positions, words

__all__ = ["CLIPPING"]

# The beginnings of the names of layers without parameters.
PLAIN = (
    *("ReLU", "LeakyReLU", "GELU", "SiLU", "ELU", "Tanh", "Sigmoid", "Softmax", "LogSoftmax"),
    *("Dropout", "Flatten", "Unflatten", "Identity", "MaxPool", "AvgPool", "Adaptive", "Softplus"),
    *("Hardtanh", "Mish", "Upsample", "PixelShuffle"),
)


def every_microbatch(update: Update) -> Iterator[Report]:
    """MS201: a clip in a pass that does not step.

    Args:
        update: One optimizer in one place.
    """
    if update.is_accelerated:
        yield from _accelerated(update)
        return
    found: Event | None = None
    if update.is_flat and update.gate is not None and update.gate[1]:
        for run in update.inside_runs():
            others = [a for a in run.answer if a.topic is Topic.WINDOW and a != update.gate[0]]
            if any(run.answer[atom] for atom in others):
                continue
            found = found or _clip_after_backward(update, run)
    elif update.is_nested and update.place.inner is not None and accumulates(update):
        events = [n for n in walk(update.place.inner.body) if isinstance(n, Event)]
        if any(event.act is Act.STEP for event in events):
            return
        seen = False
        for event in events:
            seen = seen or event.act is Act.BACKWARD
            if seen and event.act is Act.CLIP and not event.calm and update.touches(event.subject):
                found = found or event
    if found is not None:
        yield Report(
            "MS201",
            found.node,
            f"{at(found)} runs with every microbatch, and the step once in "
            f"`{update.length or 'k'}` of them.",
        )


def _clip_after_backward(update: Update, run: Run) -> Event | None:
    backwards = positions(run, Act.BACKWARD)
    for number, event in enumerate(run.events):
        is_clip = event.act is Act.CLIP and not event.calm and update.touches(event.subject)
        if is_clip and backwards and backwards[0] < number:
            return event
    return None


def _accelerated(update: Update) -> Iterator[Report]:
    for run in update.runs:
        if any(yes and atom.topic is Topic.WINDOW for atom, yes in run.answer.items()):
            continue
        for event in run.events:
            owner = next((c.subject for c in event.contexts if c.name == "accumulate"), None)
            if event.act is not Act.CLIP or event.calm or not isinstance(owner, Accelerator):
                continue
            if owner.num_steps is None or key_of(owner.num_steps) == "1":
                continue
            yield Report(
                "MS201",
                event.node,
                f"{at(event)} runs with every microbatch inside `accumulate`, which lets the "
                f"optimizer step once in `{key_of(owner.num_steps)}` of them; it is not under "
                "`sync_gradients`.",
            )
            return


def before_unscale(update: Update) -> Iterator[Report]:
    """MS202: scaled backward, clip, `scaler.step`, and no `unscale_` before the clip.

    Args:
        update: One optimizer in one place.
    """
    found: Event | None = None
    for run in update.step_runs():
        event = _scaled_clip(update, run)
        if event is True:
            return
        found = found or (event if isinstance(event, Event) else None)
    if found is None:
        return
    scaler = next((s.by for s in update.steps if _is_scaler(s)), None)
    edits: tuple[Edit, ...] = ()
    if scaler is not None and not key_of(scaler).startswith("<"):
        step = next(s for s in update.steps if _is_scaler(s))
        text = text_of(step.node.func.value)  # type: ignore[attr-defined]
        argument = text_of(step.node.args[0])  # type: ignore[attr-defined]
        edits = (
            Edit(found.node, f"{text}.unscale_({argument})", is_line_before=True, beside=step.node),
        )
    yield Report(
        "MS202",
        found.node,
        f"{at(found)} sees gradients that still carry the loss scale: nothing calls `unscale_` "
        f"between the scaled backward and it.",
        edits=edits,
    )


def _is_scaler(step: Event) -> bool:
    by = step.by
    if isinstance(by, Scaler):
        return by.enabled
    return by is not None and "scaler" in key_of(by).lower()


def _scaled_clip(update: Update, run: Run) -> Event | bool | None:
    """The clip that comes too early; True when the scale is taken off before a clip."""
    scaled = False
    for number, event in enumerate(run.events):
        if event.act is Act.BACKWARD and event.by is not None:
            scaled = isinstance(event.by, Scaler) or "scaler" in key_of(event.by).lower()
        elif event.act is Act.UNSCALE:
            both_made = isinstance(event.subject, Optimizer) and isinstance(
                update.optimizer, Optimizer
            )
            if not both_made or event.subject is update.optimizer:
                return True
        elif event.act in {Act.DIVIDE, Act.FILL, Act.UNKNOWN}:
            return True
        elif event.act is Act.CLIP and scaled and not event.calm and not _scales_limit(event):
            later = [s for s in update.steps_in(run) if s > number]
            if later and _is_scaler(run.events[later[0]]) and update.touches(event.subject):
                return event
    return None


def _scales_limit(event: Event) -> bool:
    """`clip_grad_norm_(params, 1.0 * scaler.get_scale())` compares like with like."""
    arguments = getattr(event.node, "args", [])[1:] + [
        keyword.value for keyword in getattr(event.node, "keywords", ())
    ]
    return any("scale" in text_of(argument) for argument in arguments)


def before_ranks_summed(update: Update) -> Iterator[Report]:
    """MS203: clip, then sum the gradients over the ranks by hand.

    Args:
        update: One optimizer in one place.
    """
    for run in update.step_runs():
        reduces, step = positions(run, Act.REDUCE), update.steps_in(run)[-1]
        for number in positions(run, Act.CLIP):
            event = run.events[number]
            if event.calm or not update.touches(event.subject):
                continue
            if any(number < reduce < step for reduce in reduces) and not any(
                reduce < number for reduce in reduces
            ):
                later = next(run.events[r] for r in reduces if number < r < step)
                yield Report("MS203", event.node, f"{at(event)} runs before {at(later)}.")
                return
            if any(context.name == "no_sync" for context in event.contexts) and not any(
                b > number for b in positions(run, Act.BACKWARD)
            ):
                yield Report("MS203", event.node, f"{at(event)} runs inside `no_sync`.")
                return


def after_step(update: Update) -> Iterator[Report]:
    """MS204: step, clip, and no backward in between.

    Args:
        update: One optimizer in one place.
    """
    found: Event | None = None
    for run in update.runs:
        last: Act | None = None
        for number, event in enumerate(run.events):
            if event.act is Act.BACKWARD or number in update.steps_in(run):
                last = event.act
            elif event.act is Act.CLIP and not event.calm and update.touches(event.subject):
                if last is not Act.STEP:
                    return
                found = found or event
    if found is not None:
        yield Report(
            "MS204", found.node, f"{at(found)} runs after {at(update.steps[0])} has been taken."
        )


def before_backward(update: Update) -> Iterator[Report]:
    """MS205: clip, backward, step.

    Args:
        update: One optimizer in one place.
    """
    found: Event | None = None
    for run in update.step_runs():
        relevant = [
            event
            for number, event in enumerate(run.events)
            if event.act is Act.BACKWARD
            or number in update.steps_in(run)
            or (event.act is Act.CLIP and not event.calm and update.touches(event.subject))
        ]
        acts = [event.act for event in relevant]
        if Act.CLIP not in acts:
            continue
        if acts[:2] != [Act.CLIP, Act.BACKWARD] or acts.count(Act.CLIP) > 1:
            return
        found = found or relevant[0]
    if found is not None:
        yield Report(
            "MS205",
            found.node,
            f"{at(found)} runs before the backward whose gradient {at(update.steps[0])} uses.",
        )


def subset(update: Update) -> Iterator[Report]:
    """MS206: a module that the optimizer steps and no clip names.

    Args:
        update: One optimizer in one place.
    """
    if not isinstance(update.optimizer, Optimizer) or update.place.is_opaque():
        return
    mine = update.optimizer.params
    clips = list(clips_of(update))
    given = [clipped_by_hand(update, event) or event.subject for event in clips]
    if not clips or not isinstance(mine, Params) or not mine.modules:
        return
    if not all(isinstance(p, Params) and p.whole and p.modules for p in given):
        return
    clipped = [module for p in given if isinstance(p, Params) for module in p.modules]
    missed = [own for own in mine.modules if not _is_clipped(own, clipped)]
    if not missed or not _are_related(mine, clipped):
        return
    yield Report(
        "MS206",
        clips[0].node,
        f"{at(clips[0])} leaves out `{key_of(bare(missed[0]))}`, which "
        f"`{key_of(update.optimizer)}` steps as well.",
    )


def _is_clipped(own: Value, clipped: list[Value]) -> bool:
    if any(covers(other, own) for other in clipped):
        return True
    inner = bare(own)
    parts = [p for p in inner.parts if _has_parameters(p)] if isinstance(inner, Module) else []
    return bool(parts) and all(_is_clipped(part, clipped) for part in parts)


def _has_parameters(module: Value) -> bool:
    """Activations, dropout and pooling hold none, nor does a number."""
    name = key_of(module).rpartition(".")[2]
    return not name.startswith(PLAIN)


def _are_related(mine: Params, clipped: list[Value]) -> bool:
    """Whether what is clipped is surely a part of what is stepped."""
    return all(any(covers(own, other) for own in mine.modules) for other in clipped)


def exhausted(update: Update) -> Iterator[Report]:
    """MS207: the clip reads what was read to its end before.

    Args:
        update: One optimizer in one place.
    """
    for event in update.place.events(Act.CLIP):
        if event.spent and update.touches(event.subject) is not False:
            node = event.subject.node if isinstance(event.subject, Params) else None
            made = f" (made by {words(node)})" if node is not None else ""
            edits = (Edit(node, "list({})"),) if node is not None else ()
            argument = event.node.args[0] if isinstance(event.node, ast.Call) else event.node
            yield Report(
                "MS207",
                event.node,
                f"{words(argument)}{made} can be read once, and was read to its end before.",
                edits=edits,
            )


def local_shard(update: Update) -> Iterator[Report]:
    """MS208: torch's clip on the parameters of a sharded model.

    Args:
        update: One optimizer in one place.
    """
    for event in clips_of(update):
        modules = event.subject.modules if isinstance(event.subject, Params) else ()
        is_torch = not isinstance(event.by, Module | Accelerator)
        for module in modules:
            if isinstance(module, Module) and module.wrap is Wrap.SHARDED and is_torch:
                yield Report(
                    "MS208",
                    event.node,
                    f"{at(event)} takes the norm of this rank's shard of `{key_of(module)}`.",
                )


def clipped_norm(update: Update) -> Iterator[Report]:
    """MS209: a norm that is taken between the clip and the next backward.

    Args:
        update: One optimizer in one place.
    """
    for run in update.step_runs():
        clips = [
            n
            for n in positions(run, Act.CLIP)
            if not run.events[n].calm and update.touches(run.events[n].subject)
        ]
        norms = positions(run, Act.NORM)
        if not clips or not norms or run.events[clips[-1]].used:
            continue
        backward = max(positions(run, Act.BACKWARD), default=-1)
        if any(backward < norm < clips[-1] for norm in norms) or backward > clips[-1]:
            continue
        after = [norm for norm in norms if norm > clips[-1]]
        if after:
            event = run.events[after[0]]
            yield Report(
                "MS209",
                event.node,
                f"{at(event)} runs after {at(run.events[clips[-1]])}, whose own result, the norm "
                "before clipping, is not used.",
            )
            return


def to_zero(update: Update) -> Iterator[Report]:
    """MS211: a threshold of 0.

    Args:
        update: One optimizer in one place.
    """
    for event in update.place.events(Act.CLIP):
        limit = event.by
        if isinstance(event.node, ast.Call) and isinstance(limit, Module | Accelerator):
            limit = None
        if isinstance(limit, Const) and type(limit.value) in {int, float} and limit.value == 0:
            yield Report("MS211", event.node, f"{at(event)} clips to 0.", figures={"max_norm": 0})


CLIPPING = (
    every_microbatch,
    before_unscale,
    before_ranks_summed,
    after_step,
    before_backward,
    subset,
    exhausted,
    local_shard,
    clipped_norm,
    to_zero,
)
