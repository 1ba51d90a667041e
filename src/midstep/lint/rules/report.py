"""What a rule reports, and what most rules ask of an update."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from ...defects import Level
from ..evaluator import text_of
from ..loops import Update
from ..trace import Act, Event, Loop, Run, walk
from ..values import Items, Loss, Params, Scaled, Value

__all__ = ["Edit", "Report", "at", "clipped_by_hand", "loss_behind", "positions", "words"]


@dataclasses.dataclass(frozen=True, slots=True)
class Edit:
    """One change of the text that mends a defect.

    Args:
        node: What is replaced, or what a line is put in front of.
        text: The new text; `{}` in it is the old one, comments and all.
        is_line_before: Put a line in front, indented like the statement of the node.
        beside: A node in whose function the names of the new line are in sight.
    """

    node: ast.AST
    text: str
    is_line_before: bool = False
    beside: ast.AST | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """A defect at a node of the syntax tree.

    Args:
        code: Of the catalogue.
        node: Where.
        evidence: One sentence, with its values in backticks.
        figures: By name.
        level: Where the rule is surer or less sure than usual.
        edits: Changes that mend it; empty where that is not safe.
    """

    code: str
    node: ast.AST
    evidence: str
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)
    level: Level | None = None
    edits: tuple[Edit, ...] = ()


def at(event: Event) -> str:
    """The words of what happens at an event.

    Args:
        event: Any.
    """
    return words(event.node)


def words(node: ast.AST) -> str:
    """The words of a node, in backticks and on one line.

    Args:
        node: An expression or a statement.
    """
    text = " ".join(text_of(node).split())
    return f"`{text if len(text) <= 60 else text[:57] + '...'}`"


def positions(run: Run, *acts: Act) -> list[int]:
    """Where events of these kinds stand in a run.

    Args:
        run: One way through a loop.
        acts: The kinds.
    """
    return [number for number, event in enumerate(run.events) if event.act in acts]


def loss_behind(value: Value | None) -> Loss | None:
    """The loss that a backward starts from.

    Args:
        value: The subject of the backward.
    """
    while isinstance(value, Scaled):
        value = value.loss
    return value if isinstance(value, Loss) else None


def between(run: Run, first: int, last: int, acts: Sequence[Act]) -> bool:
    """Whether anything of these kinds happens between two positions.

    Args:
        run: One way through a loop.
        first: After this position.
        last: Before this one.
        acts: The kinds.
    """
    return any(event.act in acts for event in run.events[first + 1 : last])


def clips_of(update: Update) -> Iterator[Event]:
    """The clips of this optimizer's gradients, those that only measure left out.

    Args:
        update: One optimizer in one place.
    """
    for event in update.place.events(Act.CLIP):
        if not event.calm and update.touches(event.subject):
            yield event


def clipped_by_hand(update: Update, clip: Event) -> Params | None:
    """What `for p in params: p.grad.mul_(limit / norm)` clips.

    Args:
        update: One optimizer in one place.
        clip: One of its clips.

    Returns:
        The parameters; None for any other clip, and where no norm is in sight.
    """
    if not update.place.events(Act.NORM):
        return None
    for loop in update.place.nodes():
        if not isinstance(loop, Loop) or not isinstance(loop.node, ast.For):
            continue
        target = text_of(loop.node.target)
        is_of_each = text_of(clip.node).startswith(f"{target}.grad")
        if is_of_each and any(node is clip for node in walk(loop.body)):
            items = loop.iterator.items if isinstance(loop.iterator, Items) else [loop.iterator]
            several = [item for item in items if isinstance(item, Params) and item.whole]
            modules = tuple(module for item in several for module in item.modules)
            return Params(modules, one_shot=False, whole=len(several) == len(items))
    return None
