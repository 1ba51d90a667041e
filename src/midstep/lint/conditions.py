"""Conditions as formulas over a few questions that matter: is the window complete? is it finite?

The same question asked twice, in other words or the other way round, is one atom. So a loop is read
once for each answer, and what cannot happen together (two remainders at once) is left out.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "FALSE",
    "TRUE",
    "All",
    "Either",
    "Ask",
    "Atom",
    "Formula",
    "Not",
    "Topic",
    "answers",
    "atoms_of",
    "both",
    "either",
    "holds",
    "negated",
]


class Topic(enum.Enum):
    """What a question is about."""

    WINDOW = enum.auto()  # is this microbatch the last of its window?
    TAIL = enum.auto()  # is it the last of the pass?
    FINITE = enum.auto()  # is a loss or a norm finite?
    STEPPED = enum.auto()  # did the scaler take the step?
    OTHER = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Atom:
    """One question.

    Args:
        topic: What it is about.
        key: Its words, equal for equal questions.
        index: For a window, the words of what is counted.
        modulus: For a window, the words of its length.
        phase: For a window, what is added to the count, less the remainder that is asked for.
        start: For a window, the count in the first pass; None if not known. A window of k ends
            after k microbatches when `start + phase` is 1.
        survives: The counter goes on over the passes, so that no tail is left.
        resets: The counter is set back when a window ends.
    """

    topic: Topic
    key: str
    index: str = ""
    modulus: str = ""
    phase: int = 0
    start: int | None = None
    survives: bool = False
    resets: bool = False


class Formula:
    """A condition."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Ask(Formula):
    """One question, answered with yes."""

    atom: Atom


@dataclasses.dataclass(frozen=True, slots=True)
class Not(Formula):
    """The opposite."""

    of: Formula


@dataclasses.dataclass(frozen=True, slots=True)
class All(Formula):
    """True when all parts are; without parts, always."""

    parts: tuple[Formula, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Either(Formula):
    """True when one part is; without parts, never."""

    parts: tuple[Formula, ...]


TRUE: Formula = All(())
FALSE: Formula = Either(())


def negated(formula: Formula) -> Formula:
    """The opposite.

    Args:
        formula: Any.

    Example:
        >>> negated(TRUE) == FALSE
        True
    """
    if isinstance(formula, Not):
        return formula.of
    if formula == TRUE:
        return FALSE
    if formula == FALSE:
        return TRUE
    return Not(formula)


def both(parts: Sequence[Formula]) -> Formula:
    """True when all are.

    Args:
        parts: Formulas.
    """
    kept = tuple(part for part in parts if part != TRUE)
    if FALSE in kept:
        return FALSE
    return kept[0] if len(kept) == 1 else All(kept)


def either(parts: Sequence[Formula]) -> Formula:
    """True when one is.

    Args:
        parts: Formulas.
    """
    kept = tuple(part for part in parts if part != FALSE)
    if TRUE in kept:
        return TRUE
    return kept[0] if len(kept) == 1 else Either(kept)


def holds(formula: Formula, answer: Mapping[Atom, bool]) -> bool:
    """Whether a formula is true, given the answers.

    Args:
        formula: Any.
        answer: To every atom in it.
    """
    if isinstance(formula, Ask):
        return answer[formula.atom]
    if isinstance(formula, Not):
        return not holds(formula.of, answer)
    if isinstance(formula, All):
        return all(holds(part, answer) for part in formula.parts)
    assert isinstance(formula, Either)
    return any(holds(part, answer) for part in formula.parts)


def atoms_of(formula: Formula) -> Iterator[Atom]:
    """Every question in a formula.

    Args:
        formula: Any.
    """
    if isinstance(formula, Ask):
        yield formula.atom
    elif isinstance(formula, Not):
        yield from atoms_of(formula.of)
    elif isinstance(formula, All | Either):
        for part in formula.parts:
            yield from atoms_of(part)


def answers(atoms: Sequence[Atom]) -> Iterator[dict[Atom, bool]]:
    """Every way to answer some questions that can happen.

    Args:
        atoms: The questions, at most 8 of them.

    Example:
        >>> first = Atom(Topic.WINDOW, "a", index="i", modulus="k", phase=0)
        >>> second = Atom(Topic.WINDOW, "b", index="i", modulus="k", phase=1)
        >>> [tuple(way.values()) for way in answers([first, second])]
        [(False, False), (False, True), (True, False)]
    """
    rivals = [
        (first, second)
        for first, second in itertools.combinations(atoms, 2)
        if first.topic is second.topic is Topic.WINDOW
        and first.modulus
        and (first.index, first.modulus) == (second.index, second.modulus)
    ]
    for values in itertools.product((False, True), repeat=len(atoms)):
        answer = dict(zip(atoms, values, strict=True))
        if not any(answer[first] and answer[second] for first, second in rivals):
            yield answer
