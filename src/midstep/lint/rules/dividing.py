"""MS101 to MS104 and MS114: what the gradient of a window is divided by."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ...defects import Level
from ..conditions import Topic
from ..evaluator import text_of
from ..loops import Update
from ..sameness import same
from ..trace import Act, Block, Event, Loop, Node, walk
from ..values import (
    Accelerator,
    Const,
    Items,
    Kind,
    Value,
    WindowSum,
    key_of,
)
from ..values import (
    Iterator as Iterates,
)
from .report import Report, at, positions, words

__all__ = ["DIVIDING"]


def _accumulates(update: Update) -> bool:
    return update.is_flat or (update.is_nested and _inner_is_window(update))


def _in_window(update: Update, event: Event) -> bool:
    """Whether a backward runs with every microbatch, and not once beside the inner loop."""
    inner = update.place.inner
    return not update.is_nested or inner is None or event in set(walk(inner.body))


def _inner_is_window(update: Update) -> bool:
    """Whether the inner loop is over microbatches, not over the terms of one loss."""
    inner = update.place.inner
    if inner is None:
        return False
    divided = any(
        update.divides_by_length(divisor, node) or isinstance(divisor, WindowSum)
        for _, loss in update.losses()
        if loss is not None
        for divisor, node in loss.divisors
    )
    return divided or update.is_named


def mean_of_means(update: Update) -> Iterator[Report]:
    """MS101: a mean over a number that changes, divided by a number that does not.

    Args:
        update: One optimizer in one place.
    """
    if not _accumulates(update):
        return
    for event, loss in update.losses():
        if loss is None or not loss.unequal or loss.kind is not Kind.MEAN:
            continue
        if not _in_window(update, event):
            continue
        if any(isinstance(divisor, WindowSum) for divisor, _ in loss.divisors):
            continue
        by = next((k for k, n in loss.divisors if update.divides_by_length(k, n)), None)
        if by is None and update.is_nested:
            continue
        how = f"divided by `{key_of(by)}`" if by is not None else "summed over the window"
        yield Report(
            "MS101",
            loss.node,
            f"{words(loss.node)} is a mean whose number of targets changes ({loss.unequal}), and "
            f"it is {how}, the same for every microbatch.",
        )


def divided_twice(update: Update) -> Iterator[Report]:
    """MS102: two divisions by the length of the window, or one that a framework does as well.

    Args:
        update: One optimizer in one place.
    """
    for event, loss in update.losses():
        if loss is None:
            continue
        by_length = [(k, node) for k, node in loss.divisors if update.divides_by_length(k, node)]
        by_hand = _gradients_divided(update) if by_length and update.length else None
        sums = [(k, node) for k, node in loss.divisors if isinstance(k, WindowSum)]
        if (len(by_length) > 1 and not all(isinstance(k, Const) for k, _ in by_length)) or (
            len(by_length) > 1 and update.length
        ):
            yield _twice(by_length[-1][1], by_length[0][0], by_length[-1][0])
        elif by_hand is not None:
            yield Report(
                "MS102",
                by_hand.node,
                f"{words(by_hand.node)} divides gradients by `{update.length}`, and "
                f"{words(by_length[0][1])} has divided their losses by it.",
            )
        elif sums and by_length and _is_window_of(sums[0][0], update):
            yield Report(
                "MS102",
                by_length[-1][1],
                "The loss is divided by the count of the whole window, and "
                f"{words(by_length[-1][1])} divides it by the number of microbatches, "
                f"`{key_of(by_length[-1][0])}`, once more.",
            )
        elif by_length and (steps := _framework_divides(event)) is not None:
            yield Report(
                "MS102",
                by_length[-1][1],
                f"{at(event)} divides by `gradient_accumulation_steps` (`{key_of(steps)}`) itself, "
                f"and {words(by_length[-1][1])} does so, too.",
            )


def _gradients_divided(update: Update) -> Event | None:
    """The one place where gradients are divided by hand, by the length of the window."""
    events = update.place.events(Act.DIVIDE)
    is_it = len(events) == 1 and key_of(events[0].by) == update.length
    return events[0] if is_it else None


def gradients_divided(update: Update) -> Iterator[Report]:
    """MS102: `.grad` is divided with every microbatch, and holds those before it as well.

    Args:
        update: One optimizer in one place.
    """
    if not update.is_flat or not update.is_only:
        return
    found: Event | None = None
    for run in update.inside_runs():
        for last in positions(run, Act.BACKWARD)[-1:]:
            after = run.events[last:]
            if any(event.act in {Act.ZERO, Act.UNKNOWN} for event in after):
                return
            found = found or next((event for event in after if event.act is Act.DIVIDE), None)
    if found is None:
        return
    yield Report(
        "MS102",
        found.node,
        f"{at(found)} changes the gradients of all microbatches of the window so far, with each of "
        f"`{update.length or 'k'}`: those of the first most often.",
    )


def _twice(node: ast.AST, first: Value, second: Value) -> Report:
    return Report(
        "MS102",
        node,
        f"{words(node)} divides by `{key_of(second)}` a loss that was divided by `{key_of(first)}` "
        "before.",
    )


def _is_window_of(total: Value, update: Update) -> bool:
    inner = update.place.inner
    over = inner.iterator if inner is not None else None
    return isinstance(total, WindowSum) and (over is None or same(total.over, over))


def _framework_divides(event: Event) -> Value | None:
    by = event.by
    if not isinstance(by, Accelerator) or by.num_steps is None:
        return None
    is_one = isinstance(by.num_steps, Const) and by.num_steps.value == 1
    return None if is_one else by.num_steps


def not_divided(update: Update) -> Iterator[Report]:
    """MS103: mean losses summed over a window and divided by nothing.

    Args:
        update: One optimizer in one place.
    """
    is_window = update.is_flat or (update.is_nested and update.is_named)
    if not is_window or update.place.is_opaque() or update.place.events(Act.DIVIDE, Act.FILL):
        return
    if _changes_rate(update) or _clears_inside(update):
        return
    losses = update.losses()
    if len(losses) != 1:
        return
    event, loss = losses[0]
    if not _in_window(update, event):
        return
    if loss is None or loss.kind is not Kind.MEAN or loss.divisors or loss.scaled:
        return
    if isinstance(event.by, Accelerator) and event.by.num_steps is not None:
        return
    if event.by is not None and _framework_of(event):
        return
    yield Report(
        "MS103",
        event.node,
        f"{at(event)} adds the gradient of a mean loss, {words(loss.node)}, in each of "
        f"`{update.length or 'k'}` microbatches, and nothing divides the sum.",
    )


def _framework_of(event: Event) -> bool:
    """`accelerator.backward(loss)` of an accelerator that is not in sight may divide."""
    return text_of(event.node).partition("(")[0] not in {"", "loss.backward"} and not isinstance(
        event.node, ast.Call
    )


def _clears_inside(update: Update) -> bool:
    """Whether every microbatch clears what the one before it left, so that nothing is summed."""
    clearing = (
        positions(run, Act.ZERO) for run in (update.inside_runs() if update.is_flat else ())
    )
    return any(clearing)


def _changes_rate(update: Update) -> bool:
    """A rate that was divided by the length, instead of the loss."""
    node = getattr(update.optimizer, "node", None)
    return isinstance(node, ast.Call) and any(
        keyword.arg == "lr" and update.length and update.length in text_of(keyword.value)
        for keyword in node.keywords
    )


def tail_wrong_divisor(update: Update) -> Iterator[Report]:
    """MS104: the last window is stepped, and divided by the full length.

    Args:
        update: One optimizer in one place.
    """
    if not update.is_flat or update.gate is None or update.gate[0].survives:
        return
    tail = _tail_clause(update)
    flush = _flush(update) if tail is None else None
    if (tail is None and flush is None) or _is_full(update) or _mended(update):
        return
    for _, loss in update.losses():
        if loss is None:
            continue
        for divisor, node in loss.divisors:
            if key_of(divisor) == update.length and not _changes(update, update.length):
                how = "steps on the last batch, too" if tail else "is stepped after the loop"
                yield Report(
                    "MS104",
                    node,
                    f"{words(node)} divides every loss by `{update.length}`, and the last window, "
                    f"which {how}, may hold fewer microbatches.",
                    level=_level(update),
                )


def _level(update: Update) -> Level | None:
    length, loop = _numbers(update)
    return Level.ERROR if length is not None and loop is not None else None


def _numbers(update: Update) -> tuple[int | None, int | None]:
    try:
        length = int(update.length)
    except ValueError:
        length = None
    iterator = update.place.loop.iterator if update.place.loop is not None else None
    total = iterator.length if isinstance(iterator, Iterates) else None
    if isinstance(iterator, Items) and iterator.is_list:
        total = Const(len(iterator.items))
    number = total.value if isinstance(total, Const) else None
    return length, number if isinstance(number, int) else None


def _is_full(update: Update) -> bool:
    """Whether the number of microbatches is known to be a multiple of the length."""
    length, loop = _numbers(update)
    return length is not None and loop is not None and length > 0 and loop % length == 0


def _tail_clause(update: Update) -> bool | None:
    assert update.gate is not None
    atom, ends_at = update.gate
    for run in update.step_runs():
        if run.answer[atom] is not ends_at and any(
            yes and other.topic is Topic.TAIL for other, yes in run.answer.items()
        ):
            return True
    return None


def _flush(update: Update) -> Event | None:
    """A step after the loop, before the next pass begins."""
    outer = {id(loop.body) for loop in update.place.outer}
    for block, position in reversed(update.place.siblings):
        for node in block.nodes[position + 1 :]:
            if isinstance(node, Loop):
                return None
            if isinstance(node, Event):
                events = [node]
            else:
                events = [part for part in walk(_as_block(node)) if isinstance(part, Event)]
            for event in events:
                if event.act is Act.STEP and same(event.subject, update.optimizer):
                    return event
        if id(block) in outer:
            return None
    return None


def _changes(update: Update, name: str) -> bool:
    """Whether the loop itself gives another length to its last window."""
    loop = update.place.loop
    stores = (ast.Name, ast.Attribute)
    return loop is not None and any(
        isinstance(node, stores) and isinstance(node.ctx, ast.Store) and text_of(node) == name
        for node in ast.walk(loop.node)
    )


def _mended(update: Update) -> bool:
    """Whether gradients are multiplied by hand before the step: by what is missing, perhaps."""
    around = [node for node in update.place.after() if not isinstance(node, Loop)]
    nodes = (*update.place.nodes(), *walk(Block(list(around))))
    return any(isinstance(node, Event) and node.act in {Act.DIVIDE, Act.FILL} for node in nodes)


def _as_block(node: Node) -> Block:
    return Block([node])


def loss_across_rows(update: Update) -> Iterator[Report]:
    """MS114: a loss over pairs of rows, accumulated.

    Args:
        update: One optimizer in one place.
    """
    if not (_accumulates(update) or update.is_accelerated):
        return
    for event, loss in update.losses():
        if loss is not None and loss.across_rows and _in_window(update, event):
            yield Report(
                "MS114",
                loss.node,
                f"{words(loss.node)} sets each row against all others of its microbatch, and is "
                f"accumulated over `{update.length or 'several'}` microbatches.",
            )


DIVIDING = (
    mean_of_means,
    divided_twice,
    gradients_divided,
    not_divided,
    tail_wrong_divisor,
    loss_across_rows,
)
is_full, has_tail, flush_of, accumulates = _is_full, _tail_clause, _flush, _accumulates
numbers = _numbers
