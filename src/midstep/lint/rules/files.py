"""Rules that read a whole file: MS705 recomputation, MS706 and MS707 checkpoints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from ..evaluator import text_of
from ..reading import Root
from ..source import Source
from ..trace import Act, Event, Loop, walk
from ..values import Scaler, Schedule, Value, key_of
from .report import Edit, Report, words
from .resuming import optimizer_forgotten

__all__ = ["FILES"]

# What `load_state_dict` is given was read from a file, by this file or another.
READS_A_FILE = re.compile(
    r"\bload\(|load_(check|ckpt|snap|file|from|model|state\()|restore|resume", re.IGNORECASE
)
RANDOM = ("rng_state", "random_state", "get_state", "set_state", "rng", "StatefulDataLoader")


def recompute(source: Source, roots: Sequence[Root]) -> Iterator[Report]:
    """MS705: `preserve_rng_state=False`, and dropout in the file.

    Args:
        source: The file.
        roots: What it does.
    """
    del roots
    if "preserve_rng_state" not in source.text or not _has_dropout(source.tree):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if (
                    keyword.arg == "preserve_rng_state"
                    and _is_false(keyword.value)
                    and not _has_no_dropout(source.tree, node)
                ):
                    yield _recompute(node, Edit(keyword.value, "True"))
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                is_it = isinstance(key, ast.Constant) and key.value == "preserve_rng_state"
                if is_it and _is_false(value):
                    yield _recompute(node, Edit(value, "True"))


def _has_no_dropout(tree: ast.AST, call: ast.Call) -> bool:
    """Whether what is recomputed is made of torch's layers in sight, and of none that draws."""
    block = call.args[0] if call.args else None
    if not isinstance(block, ast.Name):
        return False
    made = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and any(text_of(t) == block.id for t in node.targets)
    ]
    return bool(made) and all(
        isinstance(value, ast.Call)
        and text_of(value.func).startswith(("nn.", "torch.nn."))
        and "ropout" not in text_of(value)
        for value in made
    )


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _has_dropout(tree: ast.AST) -> bool:
    """Whether something may drop values: a name for it that is only ever 0 does not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            words = text_of(node.func).rpartition(".")[2]
            if "ropout" in words and not (node.args and _is_zero(node.args[0])):
                return True
            for keyword in node.keywords:
                name = keyword.arg or ""
                if "ropout" in name and not _is_zero(keyword.value):
                    return True
        elif isinstance(node, ast.arguments):
            positional = [*node.posonlyargs, *node.args][-len(node.defaults) or None :]
            pairs = [*zip(positional, node.defaults, strict=False)]
            pairs += [(a, d) for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True) if d]
            if any("ropout" in a.arg and not _is_zero(d) for a, d in pairs):
                return True
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any("ropout" in text_of(t) for t in targets) and not _is_zero(node.value):
                return True
    return False


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def _recompute(node: ast.AST, edit: Edit) -> Report:
    return Report(
        "MS705",
        node,
        f"{words(node)} does not keep the random state, and the file has dropout.",
        edits=(edit,),
    )


def forgotten(source: Source, roots: Sequence[Root]) -> Iterator[Report]:
    """MS706 and MS707: a checkpoint with the optimizer, and without what else changes.

    Args:
        source: The file.
        roots: What it does.
    """
    text = source.text
    if "state_dict()" not in text or "load_state_dict(" not in text or ".save(" not in text:
        return
    if not READS_A_FILE.search(text):
        return
    saved = _state_dicts(source.tree)
    save = _save_of_optimizer(source.tree, saved)
    if save is None or not any("opt" in name.lower() for name in _loaded(source.tree)):
        return
    for thing in _changing(roots, save):
        name = key_of(thing).rpartition(".")[2]
        if any(name == other.rpartition(".")[2] for other in saved) or _saved_in_loop(source.tree):
            continue
        kind = "schedule" if isinstance(thing, Schedule) else "gradient scaler"
        yield Report(
            "MS706",
            save,
            f"{words(save)} saves the optimizer, and nothing saves the {kind} `{key_of(thing)}`.",
        )
    if not any(word in text for word in RANDOM) and "midstep" not in text:
        yield Report(
            "MS707",
            save,
            f"{words(save)} saves neither the random state nor the place in the data, and the file "
            "goes on from it.",
        )


def _state_dicts(tree: ast.AST) -> set[str]:
    return {
        text_of(node.func.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "state_dict"
    }


def _loaded(tree: ast.AST) -> set[str]:
    return {
        text_of(node.func.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "load_state_dict"
    }


def _saved_in_loop(tree: ast.AST) -> bool:
    """`{name: part.state_dict() for name, part in parts.items()}`."""
    return any(
        isinstance(node, ast.DictComp | ast.ListComp | ast.GeneratorExp | ast.For)
        and "state_dict" in ast.dump(node)
        for node in ast.walk(tree)
        if not isinstance(node, ast.For) or _loops_over_parts(node)
    )


def _loops_over_parts(node: ast.For) -> bool:
    names = {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
    return any(name in names for name in _state_dicts(node))


def _save_of_optimizer(tree: ast.AST, saved: set[str]) -> ast.Call | None:
    if not any("opt" in name.lower() for name in saved):
        return None
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and text_of(node.func) in {"torch.save", "accelerator.save"}
    ]
    for call in calls:
        names = _state_dicts(call)
        if any("opt" in name.lower() for name in names):
            return call
    named = [call for call in calls if call.args and isinstance(call.args[0], ast.Name)]
    return named[0] if len(named) == 1 else None


def _changing(roots: Sequence[Root], save: ast.Call) -> list[Value]:
    """Schedules and scalers that are made in sight and used in a loop, and could be saved there."""
    found: list[Value] = []
    for root in roots:
        is_in_reach = root.name == "module" or any(
            node is save for function in root.entered for node in ast.walk(function)
        )
        for loop in walk(root.block):
            if not isinstance(loop, Loop):
                continue
            for node in walk(loop.body):
                if not isinstance(node, Event):
                    continue
                thing = node.subject if node.act in {Act.TICK, Act.UPDATE} else None
                is_made = isinstance(thing, Schedule) and not thing.resumes and not node.calm
                is_made = is_made or (isinstance(thing, Scaler) and thing.enabled)
                # A name of a function that saves nothing is not seen where something is saved.
                is_seen = is_in_reach or "." in key_of(thing)
                if is_made and is_seen and thing is not None and thing not in found:
                    found.append(thing)
    return found


FILES = (recompute, forgotten, optimizer_forgotten)
