"""MS105 to MS108, MS110, MS112 and MS113: where a window ends and what is cleared in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..conditions import Atom, Topic, atoms_of
from ..evaluator import text_of
from ..known import is_accumulation_name
from ..loops import Update
from ..sameness import named_length
from ..trace import Act, Branch, Event, Exit, Node, Run, walk
from ..values import Accelerator, Module, Params, key_of
from .dividing import accumulates, flush_of, has_tail, is_full
from .report import Report, at, positions, words

__all__ = ["WINDOWS"]


def _branch(update: Update) -> Branch | None:
    """The `if` that asks whether the window is complete."""
    assert update.gate is not None
    for node in update.place.nodes():
        if isinstance(node, Branch) and update.gate[0] in set(atoms_of(node.formula)):
            return node
    return None


def tail_lost(update: Update) -> Iterator[Report]:
    """MS105 and MS106: nothing steps on the last, short window.

    Args:
        update: One optimizer in one place.
    """
    if not update.is_flat or update.gate is None:
        return
    atom, loop = update.gate[0], update.place.loop
    if loop is None or loop.is_called or loop.is_endless or not atom.modulus:
        return
    if atom.survives or atom.start is None or is_full(update):
        return
    if has_tail(update) or flush_of(update) is not None or update.place.is_opaque():
        return
    if _ends_whole(update):
        return
    branch = _branch(update)
    if branch is None:
        return
    test = getattr(branch.node, "test", branch.node)
    is_cleared = any(_clears_before(update))
    code = "MS105" if is_cleared or not update.place.outer else "MS106"
    then = (
        "nothing uses the gradients of what is left"
        if code == "MS105"
        else "the gradients of what is left are added to the next pass"
    )
    yield Report(
        code,
        branch.node,
        f"{words(test)} does not hold on the last batch unless the number of batches is a "
        f"multiple of `{update.length}`; {then}.",
    )


def _ends_whole(update: Update) -> bool:
    """Whether the loop is left when no whole window is to come: `if i // k >= n: break`."""
    for node in update.place.nodes():
        if isinstance(node, Branch):
            test = text_of(getattr(node.node, "test", node.node))
            leaves = any(isinstance(n, Exit) and n.word == "break" for n in walk(node.body))
            if leaves and f"// {update.length}" in test:
                return True
    return False


def _clears_before(update: Update) -> Iterator[bool]:
    outer = {id(loop.body) for loop in update.place.outer}
    for block, position in reversed(update.place.siblings):
        for node in block.nodes[:position]:
            if isinstance(node, Event) and node.act is Act.ZERO:
                yield True
        if id(block) in outer:
            return


def off_by_one(update: Update) -> Iterator[Report]:
    """MS107: the first window is one microbatch too short or too long.

    Args:
        update: One optimizer in one place.
    """
    if not update.is_flat or update.gate is None:
        return
    atom, ends_at = update.gate
    if not ends_at or atom.start is None or not atom.modulus:
        return
    first = atom.start + atom.phase
    is_right = first == 1
    if atom.modulus.isdigit() and int(atom.modulus) > 0:
        is_right = (first - 1) % int(atom.modulus) == 0
    branch = _branch(update)
    if is_right or branch is None or (atom.survives and not atom.resets and first != 0):
        return
    test = getattr(branch.node, "test", branch.node)
    told = "on the first microbatch" if first == 0 else "one microbatch too early"
    if first == 0 and atom.resets and "%" not in atom.key:
        told = "one microbatch too late"
    yield Report(
        "MS107",
        branch.node,
        f"{words(test)} holds {told}: what it counts is {first} in the first pass.",
        figures={"first": first},
    )


def inverted(update: Update) -> Iterator[Report]:
    """MS108: the step is taken wherever the window does not end.

    Args:
        update: One optimizer in one place.
    """
    if not update.is_flat or update.gate is None or update.gate[1] or not update.is_only:
        return
    branch = _branch(update)
    if branch is not None and update.gate[0].modulus:
        test = getattr(branch.node, "test", branch.node)
        yield Report(
            "MS108",
            branch.node,
            f"{words(test)} is true between the ends of windows of `{update.length}` and false at "
            "them, and the step is under it.",
        )


def cleared_inside(update: Update) -> Iterator[Report]:
    """MS110: cleared in every pass, stepped in every k-th.

    Args:
        update: One optimizer in one place.
    """
    if update.is_flat and update.gate is not None and update.gate[1]:
        inside = [run for run in update.inside_runs() if not _refuses(run)]
        clearing = [_clearing(update, run) for run in inside]
        if inside and all(event is not None for event in clearing):
            yield from _cleared(update, clearing[0])
    elif update.is_nested and update.place.inner is not None:
        nodes = list(walk(update.place.inner.body))
        if not (accumulates(update) or _is_lost(update, nodes)):
            return
        if any(isinstance(node, Branch) for node in nodes):
            return
        for node in nodes:
            if isinstance(node, Event) and node.act is Act.ZERO and update.clears(node):
                yield from _cleared(update, node)
                return


def _is_lost(update: Update, nodes: list[Node]) -> bool:
    """Whether each pass of an inner loop divides its loss, and nothing keeps the gradients."""
    inner = update.place.inner
    has_divisor = any(loss is not None and loss.divisors for _, loss in update.losses())
    acts = [node.act for node in nodes if isinstance(node, Event)]
    others = [e for e in update.place.events(Act.BACKWARD) if e not in nodes]
    reads = inner is None or any(
        isinstance(part, ast.Attribute) and "grad" in part.attr and part.attr != "zero_grad"
        for part in ast.walk(inner.node)
    )
    return has_divisor and Act.STEP not in acts and not others and not reads


def _refuses(run: Run) -> bool:
    return any(atom.topic is Topic.FINITE and not yes for atom, yes in run.answer.items())


def _clearing(update: Update, run: Run) -> Event | None:
    if not positions(run, Act.BACKWARD):
        return None
    for event in run.events:
        if event.act is Act.ZERO and update.clears(event):
            return event
    return None


def _cleared(update: Update, event: Event | None) -> Iterator[Report]:
    if event is not None:
        yield Report(
            "MS110",
            event.node,
            f"{at(event)} runs with every microbatch, and the step once in "
            f"`{update.length or 'k'}` of them.",
        )


def stepped_inside(update: Update) -> Iterator[Report]:
    """MS112: the loss is that of a window, and every microbatch is stepped.

    Args:
        update: One optimizer in one place.
    """
    place = update.place
    if update.gate is not None or update.is_accelerated or update.is_nested or place.is_opaque():
        return
    runs = [run for run in update.runs if positions(run, Act.BACKWARD) and not _ends(run)]
    if not runs or not all(update.steps_in(run) for run in runs):
        return
    if any(isinstance(event.by, Accelerator) for event in place.events(Act.BACKWARD)):
        return
    step = update.steps[0]
    for _, loss in update.losses():
        for divisor, node in loss.divisors if loss is not None else ():
            if is_accumulation_name(key_of(divisor)) or named_length(node):
                yield Report(
                    "MS112",
                    step.node,
                    f"{at(step)} runs with every microbatch, while {words(node)} divides "
                    "the loss by the length of a window.",
                )
                return
    if _cleared_by_window(update):
        yield Report(
            "MS112",
            step.node,
            f"{at(step)} runs with every microbatch, while gradients are cleared once a window.",
        )


def _ends(run: Run) -> bool:
    """Whether a run stops the loop, or refuses what is not finite."""
    return _refuses(run) or (run.exit is not None and run.exit.word in {"raise", "break"})


def _cleared_by_window(update: Update) -> bool:
    """Whether passes with a backward clear where a window ends, and surely not elsewhere."""
    cleared: dict[tuple[Atom, bool], set[bool | None]] = {}
    for run in update.runs:
        if not positions(run, Act.BACKWARD):
            continue
        clears = [update.clears(event) for event in run.events if event.act is Act.ZERO]
        told = True if True in clears else None if None in clears else False
        for atom, yes in run.answer.items():
            if atom.topic is Topic.WINDOW and atom.modulus:
                cleared.setdefault((atom, yes), set()).add(told)
    return any(
        yes and told == {True} and cleared.get((atom, False)) == {False}
        for (atom, yes), told in cleared.items()
    )


def batch_statistics(update: Update) -> Iterator[Report]:
    """MS113: BatchNorm in a model that accumulates.

    Args:
        update: One optimizer in one place.
    """
    if not (accumulates(update) or update.is_accelerated):
        return
    params = getattr(update.optimizer, "params", None)
    for module in params.modules if isinstance(params, Params) else ():
        node = getattr(module, "node", None)
        found = _norm_layer(node) or _norm_layer(
            getattr(getattr(module, "cls", None), "node", None)
        )
        if found is not None and isinstance(module, Module) | hasattr(module, "cls"):
            yield Report(
                "MS113",
                found,
                f"{words(found)} takes its statistics from one microbatch of "
                f"`{update.length or 'several'}`.",
            )


def _norm_layer(node: ast.AST | None) -> ast.Call | None:
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, ast.Call):
            name = part.func.attr if isinstance(part.func, ast.Attribute) else ""
            name = part.func.id if isinstance(part.func, ast.Name) else name
            if name.startswith(("BatchNorm", "SyncBatchNorm")):
                return part
    return None


WINDOWS = (tail_lost, off_by_one, inverted, cleared_inside, stepped_inside, batch_statistics)
