"""MS501 to MS506: training on several ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..conditions import Topic, atoms_of
from ..loops import Update
from ..sameness import same
from ..trace import Act, Event, Region, Run, walk
from ..values import Kind, Loss, Module, Params, Value, Wrap, key_of
from .dividing import accumulates
from .report import Report, at, positions, words

__all__ = ["RANKS"]

RANKS_WORD = re.compile(
    r"world|process|rank|replica|dp_|num_gpus|n_gpu|data_parallel", re.IGNORECASE
)


def _replicated(update: Update) -> Module | None:
    """The model of this update that is replicated over the ranks, where the text shows it."""
    params = getattr(update.optimizer, "params", None)
    modules: list[Value | None] = list(params.modules) if isinstance(params, Params) else []
    modules += _run_forward(update)
    return next((m for m in modules if _is_replicated(m)), None)  # type: ignore[return-value]


def _run_forward(update: Update) -> list[Value | None]:
    return [event.subject for event in update.place.events(Act.FORWARD)]


def _is_replicated(module: Value | None) -> bool:
    return isinstance(module, Module) and module.wrap is Wrap.REPLICATED


def local_denominator(update: Update) -> Iterator[Report]:
    """MS501 and MS502: a count of one rank, or of all ranks where their mean is taken.

    Args:
        update: One optimizer in one place.
    """
    model = _replicated(update)
    if model is None or update.place.events(Act.DIVIDE, Act.FILL, Act.REDUCE):
        return
    for _, loss in update.losses():
        if loss is None:
            continue
        if any(RANKS_WORD.search(key) for key in loss.times):
            continue
        counts = [(k, node) for k, node in loss.divisors if _is_count(k)]
        for count, node in counts:
            assert isinstance(count, Loss)
            if count.reduced:
                yield Report(
                    "MS502",
                    node,
                    f"{words(node)} divides by a count that was summed over the ranks, and "
                    f"`{key_of(model)}` takes the mean over them once more.",
                )
            else:
                yield Report(
                    "MS501",
                    node,
                    f"{words(node)} divides by a count of this rank alone, and `{key_of(model)}` "
                    "gives every rank the same weight.",
                )
        if not counts and loss.unequal.startswith("`ignore") and loss.kind is Kind.MEAN:
            yield Report(
                "MS501",
                loss.node,
                f"{words(loss.node)} is a mean over the targets of this rank ({loss.unequal}), and "
                f"`{key_of(model)}` gives every rank the same weight.",
            )


def _is_count(value: Value) -> bool:
    return isinstance(value, Loss) and value.kind is Kind.SUM and not value.divisors


def forward_outside(update: Update) -> Iterator[Report]:
    """MS503: `no_sync` around the backward alone.

    Args:
        update: One optimizer in one place.
    """
    for node in update.place.nodes():
        if not isinstance(node, Region) or node.context.name != "no_sync":
            continue
        model = node.context.subject
        if isinstance(model, Module) and model.wrap is Wrap.SHARDED:
            continue
        inside = [part for part in walk(node.body) if isinstance(part, Event)]
        acts = {event.act for event in inside}
        if Act.BACKWARD not in acts or acts & {Act.FORWARD, Act.UNKNOWN}:
            continue
        if any(isinstance(part, Region) for part in walk(node.body)):
            continue
        if model is not None and _forward_before(update, node, model):
            yield Report(
                "MS503",
                node.node,
                f"`{key_of(model)}` runs forward outside this `no_sync`, which holds the backward "
                "alone.",
            )
            return


def _forward_before(update: Update, region: Region, model: Value) -> bool:
    seen = False
    for node in update.place.nodes():
        if node is region:
            return seen
        if isinstance(node, Event) and node.act is Act.FORWARD and same(node.subject, model):
            seen = True
    return False


def synced_always(update: Update) -> Iterator[Report]:
    """MS504: accumulation under DistributedDataParallel without `no_sync`.

    Args:
        update: One optimizer in one place.
    """
    model = _replicated(update)
    if model is None or not accumulates(update) or update.place.events(Act.SYNC):
        return
    several = {id(module) for module in _run_forward(update) if _is_replicated(module)}
    if len(several) > 1 and not isinstance(getattr(update.optimizer, "params", None), Params):
        return  # which one this optimizer steps is not known
    losses = update.losses()
    if losses and not update.has_context("no_sync"):
        event = losses[0][0]
        yield Report(
            "MS504",
            event.node,
            f"{at(event)} reduces the gradients of `{key_of(model)}` in each of "
            f"`{update.length or 'k'}` microbatches.",
        )


def not_synced(update: Update) -> Iterator[Report]:
    """MS505: a step after a backward inside `no_sync`.

    Args:
        update: One optimizer in one place.
    """
    for run in update.step_runs():
        step = update.steps_in(run)[0]
        backwards = [n for n in positions(run, Act.BACKWARD) if n < step]
        if not backwards:
            continue
        event = run.events[backwards[-1]]
        context = next((c for c in event.contexts if c.name == "no_sync"), None)
        if context is None or positions(run, Act.REDUCE):
            continue
        if context.formula is not None and not _is_told(update, run, context.formula):
            continue
        if not _gate_is_told(update, run):
            continue
        yield Report(
            "MS505",
            run.events[step].node,
            f"{at(run.events[step])} can follow {at(event)} inside `no_sync`, whose gradients were "
            "not reduced.",
        )
        return


def _is_told(update: Update, run: Run, formula: object) -> bool:
    """Whether the condition of `no_sync` and that of the step can be compared."""
    del update
    atoms = set(atoms_of(formula))  # type: ignore[arg-type]
    asked = {atom for atom in run.answer if atom.topic is Topic.WINDOW}
    keys = {(atom.index, atom.modulus) for atom in asked | atoms if atom.topic is Topic.WINDOW}
    if any(atom.topic not in {Topic.WINDOW, Topic.TAIL} for atom in atoms):
        return False
    return (len(keys) <= 1 and all(atom.topic is Topic.TAIL or atom.modulus for atom in atoms)) or (
        len(asked | atoms) == 1
    )


def _gate_is_told(update: Update, run: Run) -> bool:
    """A step under a condition that text cannot compare is not judged."""
    others = [
        branch
        for branch, _ in run.tests
        if any(atom.topic is Topic.OTHER for atom in atoms_of(branch.formula))
        and any(
            isinstance(n, Region) or (isinstance(n, Event) and n.act in {Act.STEP, Act.BACKWARD})
            for block in (branch.body, branch.orelse)
            for n in walk(block)
        )
    ]
    del update
    return not others


def one_rank_skips(update: Update) -> Iterator[Report]:
    """MS506: `continue` for a bad loss, decided by each rank for itself.

    Args:
        update: One optimizer in one place.
    """
    model = _replicated(update)
    if model is None or update.place.events(Act.GATHER):
        return
    for run in update.runs:
        left = [out for out in run.left if out.word in {"continue", "return"}]
        if not left or positions(run, Act.BACKWARD):
            continue
        asked = [
            b for b, _ in run.tests if any(a.topic is Topic.FINITE for a in atoms_of(b.formula))
        ]
        if asked and any(a.topic is Topic.FINITE and not yes for a, yes in run.answer.items()):
            test = getattr(asked[-1].node, "test", asked[-1].node)
            yield Report(
                "MS506",
                left[-1].node,
                f"{words(test)} is asked by each rank for itself, and the backward of "
                f"`{key_of(model)}` waits for all of them.",
            )
            return


RANKS = (local_denominator, forward_outside, synced_always, not_synced, one_rank_skips)
