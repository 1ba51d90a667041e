"""What a training loop does, as a tree: events in order, inside loops, branches and contexts.

The tree is made by `reading`; `runs_of` turns a part of it into plain lists of events, one for each
way to answer the questions it asks.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
from collections.abc import Collection, Iterator, Sequence

from .conditions import Atom, Formula, answers, atoms_of, holds
from .values import Context, Value, thing

__all__ = ["Act", "Block", "Branch", "Event", "Exit", "Inlined", "Loop", "Node", "Run", "runs_of"]

MOST_ATOMS = 7  # 128 runs of one loop; what asks more is not judged
MOST_EVENTS = 400


class Act(enum.Enum):
    """What happens."""

    BACKWARD = enum.auto()
    FORWARD = enum.auto()
    ZERO = enum.auto()
    STEP = enum.auto()
    CLIP = enum.auto()
    NORM = enum.auto()
    UNSCALE = enum.auto()
    UPDATE = enum.auto()
    TICK = enum.auto()
    REDUCE = enum.auto()  # gradients summed over ranks by hand
    DIVIDE = enum.auto()  # gradients divided or multiplied by hand
    REPLACE = enum.auto()  # non-finite gradients replaced
    FILL = enum.auto()  # gradients made by hand
    READ = enum.auto()  # a tensor copied to the host
    KEEP = enum.auto()  # a loss added to a total
    REPORT = enum.auto()  # a loss added to a log
    MAKE = enum.auto()  # an optimizer is made
    REBUILD = enum.auto()  # a model, or a layer of one, is put in place of another
    SYNC = enum.auto()  # communication is switched on or off by hand
    GATHER = enum.auto()  # ranks tell each other something
    ELSEWHERE = enum.auto()  # a loop with steps of its own, judged by itself
    HALF = enum.auto()  # parameters are given 16 bits
    UNKNOWN = enum.auto()  # something that may do any of these


@thing
class Event:
    """One thing that happens.

    Args:
        act: What.
        node: Where it is written.
        subject: Of what: the optimizer that steps, the parameters that are clipped, the loss.
        by: Through what: the scaler, an accelerator, a threshold.
        calm: No more than a measurement, or known to do nothing.
        used: What it returns is used.
        spent: The parameters come from an iterator that was read to its end before.
        contexts: The `with` blocks that are open, filled in when a run is made.
    """

    act: Act
    node: ast.AST
    subject: Value | None = None
    by: Value | None = None
    calm: bool = False
    used: bool = True
    spent: bool = False
    contexts: tuple[Context, ...] = ()

    @property
    def line(self) -> int:
        """Where it is written."""
        line: int = getattr(self.node, "lineno", 1)
        return line


@thing
class Block:
    """Things in order."""

    nodes: list[Node] = dataclasses.field(default_factory=list)


@thing
class Branch:
    """An `if` statement."""

    formula: Formula
    body: Block
    orelse: Block
    node: ast.AST


@thing
class Region:
    """The body of a `with` statement."""

    context: Context
    body: Block
    node: ast.AST


@thing
class Attempt:
    """A `try` statement; what handles an error is a branch of its own."""

    body: Block
    handlers: list[tuple[ast.ExceptHandler, Block]]
    after: Block
    node: ast.Try | ast.TryStar


@thing
class Inlined:
    """The body of a function that was called."""

    body: Block
    node: ast.AST


@thing
class Loop:
    """A loop, or a function that somebody calls again and again."""

    body: Block
    node: ast.AST
    number: int
    iterator: Value | None = None
    is_called: bool = False  # a function: what surrounds it is not known
    is_endless: bool = False  # `while`


@thing
class Exit:
    """What leaves a loop or a function."""

    word: str  # "continue", "break", "return", "raise"
    node: ast.AST


Node = Event | Branch | Region | Attempt | Inlined | Loop | Exit


@thing
class Run:
    """One way through a loop's body.

    Args:
        answer: To every question asked on the way.
        events: In order.
        exit: What ended it early, or None.
        tests: The branches that were taken, with the answer, in order.
        left: Every `return`, `continue` or `break` on the way, of functions and inner loops too.
    """

    answer: dict[Atom, bool]
    events: list[Event]
    exit: Exit | None = None
    tests: list[tuple[Branch, bool]] = dataclasses.field(default_factory=list)
    left: list[Exit] = dataclasses.field(default_factory=list)


class _Stop(Exception):
    def __init__(self, exit_: Exit) -> None:
        super().__init__()
        self.exit = exit_


class _Player:
    """Plays one answer."""

    def __init__(self, answer: dict[Atom, bool], left_out: Collection[int]) -> None:
        self.run = Run(answer, [])
        self.open: list[Context] = []
        self.left_out = left_out

    def play(self, block: Block) -> None:
        for node in block.nodes:
            if isinstance(node, Event):
                if len(self.run.events) < MOST_EVENTS:
                    self.run.events.append(
                        dataclasses.replace(node, contexts=tuple(self.open)) if self.open else node
                    )
            elif isinstance(node, Exit):
                raise _Stop(node)
            else:
                self.inside(node)

    def inside(self, node: Branch | Region | Attempt | Inlined | Loop) -> None:
        if isinstance(node, Branch):
            if is_light(node):
                if asks_for_gradient(node):
                    self.play(node.body)
                return
            chosen = holds(node.formula, self.run.answer)
            self.run.tests.append((node, chosen))
            self.play(node.body if chosen else node.orelse)
        elif isinstance(node, Region):
            formula = node.context.formula
            is_open = formula is None or holds(formula, self.run.answer)
            if is_open:
                self.open.append(node.context)
            try:
                self.play(node.body)
            finally:
                if is_open:
                    self.open.pop()
        elif isinstance(node, Attempt):
            self.play(node.body)
            self.play(node.after)
        elif isinstance(node, Inlined):
            self.until(node.body, {"return"})
        elif node.number in self.left_out:
            self.run.events.append(Event(Act.ELSEWHERE, node.node))
        else:
            self.until(node.body, {"break", "continue"})

    def until(self, block: Block, words: set[str]) -> None:
        try:
            self.play(block)
        except _Stop as stop:
            if stop.exit.word not in words:
                raise
            self.run.left.append(stop.exit)


def runs_of(block: Block, left_out: Collection[int] = ()) -> list[Run]:
    """Every way through a block; none when it asks too many questions to be judged.

    Args:
        block: The body of a loop.
        left_out: Numbers of loops inside it that are left out; others are passed through once.
    """
    atoms = list(dict.fromkeys(_atoms(block, left_out)))
    if len(atoms) > MOST_ATOMS:
        return []
    runs = []
    for answer in answers(atoms):
        player = _Player(answer, left_out)
        try:
            player.play(block)
        except _Stop as stop:
            player.run.exit = stop.exit
            player.run.left.append(stop.exit)
        runs.append(player.run)
    return runs


def _atoms(block: Block, left_out: Collection[int]) -> Iterator[Atom]:
    for node in block.nodes:
        if isinstance(node, Branch):
            if is_light(node):
                continue
            yield from atoms_of(node.formula)
            yield from _atoms(node.body, left_out)
            yield from _atoms(node.orelse, left_out)
        elif isinstance(node, Region):
            if node.context.formula is not None:
                yield from atoms_of(node.context.formula)
            yield from _atoms(node.body, left_out)
        elif isinstance(node, Attempt):
            yield from _atoms(node.body, left_out)
            yield from _atoms(node.after, left_out)
        elif isinstance(node, Inlined) or (isinstance(node, Loop) and node.number not in left_out):
            yield from _atoms(node.body, left_out)


def inner_blocks(node: Node) -> Sequence[Block]:
    """The blocks right inside a node.

    Args:
        node: Any.
    """
    if isinstance(node, Branch):
        return (node.body, node.orelse)
    if isinstance(node, Attempt):
        return (node.body, *(block for _, block in node.handlers), node.after)
    if isinstance(node, Region | Inlined | Loop):
        return (node.body,)
    return ()


def walk(block: Block, left_out: Collection[int] = ()) -> Iterator[Node]:
    """Every node of a tree, in the order of the text.

    Args:
        block: Where to begin.
        left_out: Numbers of loops that are left out.
    """
    for node in block.nodes:
        if isinstance(node, Loop) and node.number in left_out:
            continue
        yield node
        for inner in inner_blocks(node):
            yield from walk(inner, left_out)


def is_idle(block: Block) -> bool:
    """Whether nothing happens in a block, so that its condition need not be asked.

    Args:
        block: Any.
    """
    return not any(isinstance(node, Event | Exit) for node in walk(block))


LIGHT = {
    Act.READ,
    Act.KEEP,
    Act.REPORT,
    Act.FORWARD,
    Act.NORM,
    Act.MAKE,
    Act.REBUILD,
    Act.HALF,
    Act.GATHER,
    Act.SYNC,
    Act.FILL,
}


def asks_for_gradient(branch: Branch) -> bool:
    """Whether a condition only leaves out parameters without gradient: `if p.grad is not None`.

    Args:
        branch: Any.
    """
    test = getattr(branch.node, "test", None)
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.IsNot)
        and isinstance(test.left, ast.Attribute)
        and test.left.attr == "grad"
    )


def is_light(branch: Branch) -> bool:
    """Whether nothing under a condition touches gradients or ends the pass in silence.

    Args:
        branch: Any.
    """
    for block in (branch.body, branch.orelse):
        for node in walk(block):
            if isinstance(node, Event) and node.act not in LIGHT:
                return False
            if isinstance(node, Exit) and node.word in {"continue", "return"}:
                return False
    return True
