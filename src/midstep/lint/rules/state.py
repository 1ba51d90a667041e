"""MS703 and MS704: what the optimizer holds; MS801 to MS803: what costs and buys nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..evaluator import text_of
from ..loops import Place, Update
from ..sameness import bare, covers
from ..trace import Act, Branch, Event, Loop, Node, inner_blocks, walk
from ..values import Loss, Optimizer, Params, Unknown, key_of
from .report import Edit, Report, at, loss_behind, words

__all__ = ["STATE"]

FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}


def stale(update: Update) -> Iterator[Report]:
    """MS703: the optimizer first, then another model or layer.

    Args:
        update: One optimizer in one place.
    """
    params = getattr(update.optimizer, "params", None)
    if not isinstance(params, Params):
        return
    made = False
    for node in walk(update.place.root.block):
        if not isinstance(node, Event):
            continue
        if node.act is Act.MAKE:
            made = made or node.subject is update.optimizer
        elif node.act is Act.STEP and node.subject is update.optimizer:
            return
        elif node.act is Act.REBUILD and made and node.subject is not None:
            held = next((m for m in params.modules if covers(m, node.subject)), None)
            if held is not None:
                yield Report(
                    "MS703",
                    node.node,
                    f"{at(node)} replaces parameters of `{key_of(bare(held))}` that "
                    f"`{key_of(update.optimizer)}` took before.",
                )
                return


def listed_twice(update: Update) -> Iterator[Report]:
    """MS704: one list names a module and its part, or two optimizers step one module.

    Args:
        update: One optimizer in one place.
    """
    optimizer = update.optimizer
    if not isinstance(optimizer, Optimizer) or not isinstance(optimizer.params, Params):
        return
    if not optimizer.params.whole:
        return
    modules = optimizer.params.modules
    for number, module in enumerate(modules):
        for other in modules[number + 1 :]:
            if covers(module, other) or covers(other, module):
                yield Report(
                    "MS704",
                    optimizer.node,
                    f"{words(optimizer.node)} is given the parameters of `{key_of(bare(other))}` "
                    f"and those of `{key_of(bare(module))}`, which hold the same.",
                )
                return
    yield from _shared(update, optimizer)


def _shared(update: Update, optimizer: Optimizer) -> Iterator[Report]:
    assert isinstance(optimizer.params, Params)
    if update.place.loop is None:
        return  # one part of a file after another
    for run in update.step_runs():
        own_step = update.steps_in(run)[0]
        for number, event in enumerate(run.events):
            low, high = sorted((number, own_step))
            if any(e.act in {Act.BACKWARD, Act.ZERO} for e in run.events[low:high]):
                continue  # each steps with gradients of its own
            other = event.subject
            if event.act is not Act.STEP or other is optimizer or not isinstance(other, Optimizer):
                continue
            theirs = other.params
            if not isinstance(theirs, Params) or not theirs.whole or theirs.one_shot is None:
                continue
            lines = getattr(optimizer.node, "lineno", 0), getattr(other.node, "lineno", 0)
            if lines[0] < lines[1]:
                continue
            for own in optimizer.params.modules:
                if any(covers(m, own) or covers(own, m) for m in theirs.modules):
                    yield Report(
                        "MS704",
                        optimizer.node,
                        f"`{key_of(optimizer)}` and `{key_of(other)}` both step "
                        f"`{key_of(bare(own))}` in one pass.",
                    )
                    return


def read_always(update: Update) -> Iterator[Report]:
    """MS801: the loss is read with every microbatch.

    Args:
        update: One optimizer in one place.
    """
    if update.place.loop is None:
        return
    for node in _ungated(update.place):
        if isinstance(node, Event) and node.act is Act.READ:
            subject = node.subject
            named = isinstance(subject, Unknown) and "loss" in subject.key
            if isinstance(subject, Loss) or named:
                yield Report("MS801", node.node, f"{at(node)} runs in every pass.")
                return


def _ungated(place: Place) -> Iterator[Node]:
    waiting: list[Node] = list(place.block.nodes)
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, Branch | Loop):
            waiting = [n for block in inner_blocks(node) for n in block.nodes] + waiting


def not_fused(update: Update) -> Iterator[Report]:
    """MS802: an optimizer with a fused kernel, made without it.

    Args:
        update: One optimizer in one place.
    """
    optimizer = update.optimizer
    if not isinstance(optimizer, Optimizer) or optimizer.class_name not in FUSED:
        return
    node = optimizer.node
    if isinstance(node, ast.Call) and not any(
        keyword.arg in {"fused", "foreach", "differentiable", "capturable", None}
        for keyword in node.keywords
    ):
        yield Report("MS802", node, f"{words(node)} does not pass `fused=True`.")


def graph_kept(update: Update) -> Iterator[Report]:
    """MS803: `total += loss` of a loss that was run backward.

    Args:
        update: One optimizer in one place.
    """
    if _steps_each_once(update):
        return  # as many graphs as optimizers, whatever the length of the data
    own = update.place.events(Act.BACKWARD)
    backwards = [loss for event in own if (loss := loss_behind(event.subject)) is not None]
    anywhere = [
        loss
        for node in walk(update.place.root.block)
        if isinstance(node, Event) and node.act is Act.BACKWARD
        if (loss := loss_behind(node.subject)) is not None
    ]
    totals = {
        text_of(event.node.func.value)
        for event in own
        if isinstance(event.node, ast.Call) and isinstance(event.node.func, ast.Attribute)
    }
    for event in update.place.events(Act.KEEP):
        kept = loss_behind(event.subject)
        if kept is None or (event.by is None and _words_kept(event.node) not in totals):
            continue
        if any(event.by is loss or event.by in loss.roots for loss in anywhere):
            continue  # what is added up is run backward itself
        if any(_is_of(kept, loss) for loss in backwards):
            value = event.node.value if isinstance(event.node, ast.AugAssign) else None
            edits: tuple[Edit, ...] = ()
            if isinstance(value, ast.Name | ast.Attribute):
                edits = (Edit(value, "{}.detach()"),)
            yield Report(
                "MS803",
                event.node,
                f"{at(event)} adds a tensor that still knows how it was made.",
                edits=edits,
            )


def _steps_each_once(update: Update) -> bool:
    """Whether the loop goes over optimizers: `for model, optimizer in zip(models, optimizers)`."""
    loop = update.place.loop
    if loop is None or not isinstance(loop.node, ast.For):
        return False
    names = {part.id for part in ast.walk(loop.node.target) if isinstance(part, ast.Name)}
    return key_of(update.optimizer).partition(".")[0] in names


def _words_kept(node: ast.AST) -> str:
    return text_of(node.args[0]) if isinstance(node, ast.Call) and node.args else ""


def _is_of(kept: Loss, loss: Loss) -> bool:
    """Whether what is kept is what was run backward, or what that was made from."""
    if kept is loss:
        return True
    return any(kept is root for root in loss.roots) or any(loss is root for root in kept.roots)


STATE = (stale, listed_twice, read_always, not_fused, graph_kept)
