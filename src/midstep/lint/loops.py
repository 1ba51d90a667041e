"""Find the updates of a file: the loop of each, where its windows end, and what happens in them.

An update is one optimizer in one loop. A window is *flat* when the loop goes over microbatches and
steps in every k-th pass, *nested* when a loop over microbatches stands inside the one that steps.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence

from . import known
from .conditions import Atom, Topic
from .evaluator import text_of
from .known import is_accumulation_name
from .reading import Root
from .sameness import covers, named_length, same
from .trace import Act, Block, Event, Loop, Node, Run, inner_blocks, runs_of, walk
from .values import (
    Instance,
    Items,
    Loss,
    Module,
    Optimizer,
    Params,
    Scaled,
    Value,
    key_of,
    thing,
)

__all__ = ["Place", "Update", "places_of"]


@thing
class Place:
    """A block in which updates are made, and what is around it.

    Args:
        root: The part of the file it was found in.
        block: The body of the loop that steps, or of the function when no loop does.
        loop: That loop.
        inner: The loop over microbatches inside it, when it is nested.
        outer: The loops around it, from the outside in.
        siblings: The blocks around it, from the outside in, each with the place in it.
    """

    root: Root
    block: Block
    loop: Loop | None
    inner: Loop | None
    outer: tuple[Loop, ...]
    siblings: tuple[tuple[Block, int], ...]

    @functools.cached_property
    def runs(self) -> list[Run]:
        """Every way through the block; empty when there are too many."""
        return runs_of(self.block, self.left_out)

    @functools.cached_property
    def left_out(self) -> set[int]:
        """Loops inside the block that are places of their own: they hold a backward and a step."""
        return {
            node.number
            for node in walk(self.block)
            if isinstance(node, Loop) and node is not self.inner and _has(node.body, Act.BACKWARD)
        }

    def nodes(self) -> Iterator[Node]:
        """Everything in the block, in the order of the text."""
        return walk(self.block, self.left_out)

    def events(self, *acts: Act) -> list[Event]:
        """Everything of these kinds in the block, in the order of the text."""
        return [node for node in self.nodes() if isinstance(node, Event) and node.act in acts]

    def before(self) -> Iterator[Node]:
        """What stands before the block in the blocks around it, the nearest first."""
        for block, position in reversed(self.siblings):
            yield from reversed(block.nodes[:position])

    def after(self) -> Iterator[Node]:
        """What follows the block in the blocks around it, the nearest first."""
        for block, position in reversed(self.siblings):
            yield from block.nodes[position + 1 :]

    def is_opaque(self) -> bool:
        """Whether something that is not in sight may step, clear or clip."""
        return bool(self.events(Act.UNKNOWN))

    def optimizers(self) -> list[Value]:
        """The optimizers that step, each once."""
        found: list[Value] = []
        for event in self.events(Act.STEP):
            subject = event.subject
            if subject is not None and not any(same(subject, other) for other in found):
                found.append(subject)
        return found

    def updates(self) -> list[Update]:
        """One for each optimizer that steps here after a backward."""
        if not self.events(Act.BACKWARD) or not self.runs:
            return []
        return [Update(self, optimizer) for optimizer in self.optimizers()]


class Update:
    """One optimizer in one place.

    Args:
        place: Where.
        optimizer: Which.
    """

    def __init__(self, place: Place, optimizer: Value) -> None:
        self.place, self.optimizer = place, optimizer
        self.is_only = len(place.optimizers()) == 1
        self.runs = place.runs

    def steps_in(self, run: Run) -> list[int]:
        """The positions at which this optimizer steps."""
        found, is_elsewhere = [], False
        for number, event in enumerate(run.events):
            if event.act in {Act.BACKWARD, Act.ELSEWHERE}:
                is_elsewhere = event.act is Act.ELSEWHERE
            elif event.act is Act.STEP and not is_elsewhere and same(event.subject, self.optimizer):
                found.append(number)
        return found

    @functools.cached_property
    def steps(self) -> list[Event]:
        """Where this optimizer steps."""
        events = self.place.events(Act.STEP)
        return [event for event in events if same(event.subject, self.optimizer)]

    @functools.cached_property
    def feeding(self) -> list[ast.AST]:
        """The last backward before each step: it feeds the step whatever else does."""
        nodes: list[ast.AST] = []
        for run in self.runs:
            for step in self.steps_in(run):
                before = [event for event in run.events[:step] if event.act is Act.BACKWARD]
                if before and before[-1].node not in nodes:
                    nodes.append(before[-1].node)
        return nodes

    @functools.cached_property
    def gate(self) -> tuple[Atom, bool] | None:
        """The question that decides whether a window ends, and whether it ends at yes."""
        step_runs = [run for run in self.runs if self.steps_in(run)]
        if not step_runs or len(step_runs) == len(self.runs):
            return None
        atoms = [atom for atom in step_runs[0].answer if atom.topic is Topic.WINDOW]
        for ends_at in (True, False):
            for atom in atoms:
                if self._is_gate(atom, step_runs, ends_at=ends_at):
                    return atom, ends_at
        return None

    def _is_gate(self, atom: Atom, step_runs: Sequence[Run], *, ends_at: bool) -> bool:
        for run in step_runs:
            if run.answer[atom] is not ends_at and not _at_tail(run):
                return False
        return any(
            run.answer[atom] is not ends_at and not self.steps_in(run) and self._adds_up(run)
            for run in self.runs
        )

    def _adds_up(self, run: Run) -> bool:
        """Whether a run leaves gradients for a later step of this optimizer."""
        left = False
        for event in run.events:
            if event.act is Act.BACKWARD:
                left = True
            elif event.act in {Act.STEP, Act.ELSEWHERE, Act.UNKNOWN}:
                left = False
        return left

    @functools.cached_property
    def is_accelerated(self) -> bool:
        """Whether a framework decides when the optimizer really steps."""
        inside = any(
            context.name == "accumulate"
            for run in self.runs
            for step in self.steps_in(run)
            for context in run.events[step].contexts
        )
        prepared = isinstance(self.optimizer, Optimizer) and self.optimizer.prepared
        return inside or (prepared and self.has_context("accumulate"))

    def has_context(self, name: str) -> bool:
        """Whether a `with` block of this kind is open anywhere in the place."""
        return any(
            context.name == name
            for run in self.runs
            for event in run.events
            for context in event.contexts
        )

    @property
    def is_flat(self) -> bool:
        """Whether windows end under a condition."""
        return self.gate is not None and not self.is_accelerated

    @property
    def is_nested(self) -> bool:
        """Whether an inner loop goes over the microbatches of one window."""
        return self.place.inner is not None and bool(self.steps)

    @functools.cached_property
    def length(self) -> str:
        """The words for the number of microbatches in a window, or nothing."""
        if self.gate is not None:
            return self.gate[0].modulus
        inner = self.place.inner
        if inner is not None:
            length = getattr(inner.iterator, "length", None)
            return key_of(length) if length is not None else ""
        return ""

    @property
    def is_named(self) -> bool:
        """Whether the inner loop says that it goes over microbatches: by a name, or by a cut."""
        inner = self.place.inner
        over = text_of(inner.node.iter) if inner and isinstance(inner.node, ast.For) else ""
        words = over.replace("(", " ").replace(")", " ").replace(",", " ").split()
        if inner and isinstance(inner.node, ast.For) and known.cuts_rows(inner.node.iter):
            return True
        return is_accumulation_name(self.length) or any(map(is_accumulation_name, words))

    def inside_runs(self) -> list[Run]:
        """Runs over a microbatch that is not the last of its window."""
        if self.gate is None:
            return []
        atom, ends_at = self.gate
        return [
            run
            for run in self.runs
            if run.answer[atom] is not ends_at and not _at_tail(run) and not self.steps_in(run)
        ]

    def step_runs(self) -> list[Run]:
        """Runs in which the optimizer steps."""
        return [run for run in self.runs if self.steps_in(run)]

    def losses(self) -> list[tuple[Event, Loss | None]]:
        """What the backwards that feed this optimizer start from."""
        found: list[tuple[Event, Loss | None]] = []
        for event in self.place.events(Act.BACKWARD):
            if event.node in self.feeding or self.is_only:
                subject = event.subject
                while isinstance(subject, Scaled):
                    subject = subject.loss
                found.append((event, subject if isinstance(subject, Loss) else None))
        return found

    def clears(self, event: Event) -> bool | None:
        """Whether a clearing clears this optimizer's gradients; None when it cannot be told."""
        return self.touches(event.subject)

    def touches(self, subject: Value | None) -> bool | None:
        """Whether an optimizer, a model or parameters are those of this update."""
        if subject is None:
            return None
        if isinstance(subject, Optimizer) or known.is_optimizer_key(key_of(subject)):
            if same(subject, self.optimizer):
                return True
            return False if not self.is_only else None
        if self.is_only:
            return True
        mine = self.optimizer.params if isinstance(self.optimizer, Optimizer) else None
        theirs = subject.modules if isinstance(subject, Params) else (subject,)
        if not isinstance(mine, Params) or isinstance(subject, Instance | Items):
            return None
        pairs = [(own, other) for own in mine.modules for other in theirs]
        if any(covers(own, other) or covers(other, own) for own, other in pairs):
            return True
        named = all(isinstance(module, Module) for module in (*mine.modules, *theirs))
        return False if named else None

    def divides_by_length(self, value: Value, node: ast.AST) -> bool:
        """Whether a division is by the number of microbatches in a window."""
        key = key_of(value)
        return key == self.length or is_accumulation_name(key) or named_length(node)


def _has(block: Block, act: Act) -> bool:
    return any(isinstance(node, Event) and node.act is act for node in walk(block))


def _at_tail(run: Run) -> bool:
    return any(answer and atom.topic is Topic.TAIL for atom, answer in run.answer.items())


def places_of(root: Root) -> list[Place]:
    """Every place of a root in which gradients are made and used.

    Args:
        root: A part of the file.
    """
    found: dict[int, Place] = {}
    for place in _search(root, root.block, (), ()):
        known_place = found.get(id(place.block))
        if known_place is None or (known_place.inner is None and place.inner is not None):
            found[id(place.block)] = place
    return list(found.values())


def _search(
    root: Root,
    block: Block,
    loops: tuple[Loop, ...],
    trail: tuple[tuple[Block, int], ...],
) -> Iterator[Place]:
    for number, node in enumerate(block.nodes):
        here = (*trail, (block, number))
        if isinstance(node, Event):
            if node.act is Act.BACKWARD:
                yield _place(root, loops, here)
        elif isinstance(node, Loop):
            yield from _search(root, node.body, (*loops, node), here)
        else:
            for inner in inner_blocks(node):
                yield from _search(root, inner, loops, here)


def _place(root: Root, loops: tuple[Loop, ...], trail: tuple[tuple[Block, int], ...]) -> Place:
    """The innermost block around a backward that steps; the innermost loop when none does."""
    blocks = [block for block, _ in trail]
    for depth in range(len(loops), -1, -1):
        block = loops[depth - 1].body if depth else _without_loop(blocks, loops)
        if block is not None and _has(block, Act.STEP):
            position = blocks.index(block)
            inner = loops[depth] if depth < len(loops) else None
            loop = loops[depth - 1] if depth else None
            return Place(root, block, loop, inner, loops[: max(depth - 1, 0)], trail[:position])
    block = loops[-1].body if loops else blocks[0]
    position = blocks.index(block)
    loop = loops[-1] if loops else None
    return Place(root, block, loop, None, loops[:-1], trail[:position])


def _without_loop(blocks: list[Block], loops: tuple[Loop, ...]) -> Block | None:
    """The smallest block outside all loops that steps: the body of a function."""
    outside = blocks[: blocks.index(loops[0].body)] if loops else blocks
    for block in reversed(outside):
        if _has(block, Act.STEP):
            return block
    return None
