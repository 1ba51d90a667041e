"""MS706 of the optimizer: a run goes on from weights and an epoch, with moments that begin anew."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from ..evaluator import text_of
from ..reading import Root
from ..source import Source
from ..trace import Act, Event, walk
from ..values import Optimizer, key_of
from .report import Report, words

__all__ = ["optimizer_forgotten"]

# Calls that may save or load the optimizer although their text does not show it.
MAY_KEEP = re.compile(r"save|load|resum|restore|checkpoint|ckpt|snapshot", re.IGNORECASE)
COUNTERS = re.compile(r"(^|_)(epoch|step|steps|iter|iters|iteration|it)s?$")
FRAMEWORKS = re.compile(r"save_state\(|load_state\(|deepspeed|lightning|midstep|composer|ignite")


def optimizer_forgotten(source: Source, roots: Sequence[Root]) -> Iterator[Report]:
    """MS706: the weights and the epoch are saved and gone on from, and the optimizer is not.

    Args:
        source: The file.
        roots: What it does.
    """
    text = source.text
    if "state_dict()" not in text or "load_state_dict(" not in text or "torch.save(" not in text:
        return
    if FRAMEWORKS.search(text) or _may_be_kept(source.tree):
        return
    save = _save_with_counter(source.tree)
    if save is None or not (_loads_other(source.tree) or _goes_on(source.tree)):
        return
    optimizer = _with_moments(roots)
    if optimizer is not None:
        yield Report(
            "MS706",
            save,
            f"{words(save)} saves weights and how far they came, the file goes on from there, and "
            f"nothing saves `{key_of(optimizer)}`, whose moments begin anew.",
        )


def _is_optimizer(name: str) -> bool:
    return "opt" in name.lower().rpartition(".")[2]


def _may_be_kept(tree: ast.AST) -> bool:
    """Whether the state of an optimizer is asked for, or it is given to what may ask for it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.DictComp | ast.Starred) and "state_dict" in ast.dump(node):
            return True
        if isinstance(node, ast.Attribute) and node.attr in {"state_dict", "load_state_dict"}:
            owner = text_of(node.value)
            # What a loop or a list names may be one, too.
            if _is_optimizer(owner) or not isinstance(node.value, ast.Name | ast.Attribute):
                return True
        if isinstance(node, ast.Call) and MAY_KEEP.search(text_of(node.func)):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            parts = [part for value in given for part in ast.walk(value)]
            named = (p for p in parts if isinstance(p, ast.Name | ast.Attribute))
            if any(_is_optimizer(text_of(part)) or text_of(part) == "self" for part in named):
                return True
    return False


def _save_with_counter(tree: ast.AST) -> ast.Call | None:
    """`torch.save({"model": model.state_dict(), "epoch": epoch}, path)`, also of a name."""
    dicts = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Dict)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and text_of(node.func) == "torch.save" and node.args:
            first = node.args[0]
            held = dicts.get(first.id) if isinstance(first, ast.Name) else first
            if isinstance(held, ast.Dict) and None not in held.keys and _has_both(held):
                return node
    return None


def _has_both(held: ast.Dict) -> bool:
    keys = [key.value for key in held.keys if isinstance(key, ast.Constant)]
    has_counter = any(isinstance(key, str) and COUNTERS.search(key) for key in keys)
    return has_counter and any(text_of(value).endswith(".state_dict()") for value in held.values)


def _loads_other(tree: ast.AST) -> bool:
    """Whether a schedule or a scaler is loaded: this is more than weights to begin with."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "load_state_dict"
        and re.search(r"sched|scaler", text_of(node.func.value), re.IGNORECASE)
        for node in ast.walk(tree)
    )


def _goes_on(tree: ast.AST) -> bool:
    """Whether a loop begins where the file that was read says: `range(state["epoch"], n)`."""
    counters = {
        text_of(node.targets[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _reads_counter(node.value)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Call):
            ranges = [part for part in ast.walk(node.iter) if _is_range(part)]
            starts = [part.args[0] for part in ranges if isinstance(part, ast.Call)]
            names = {text_of(p) for start in starts for p in ast.walk(start) if _is_name(p)}
            if names & counters or any(_reads_counter(start) for start in starts):
                return True
    return False


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute)


def _is_range(node: ast.AST) -> bool:
    is_call = isinstance(node, ast.Call) and text_of(node.func).rpartition(".")[2].endswith("range")
    return is_call and len(node.args) > 1  # type: ignore[attr-defined]


def _reads_counter(node: ast.AST) -> bool:
    return any(
        isinstance(part, ast.Subscript)
        and isinstance(part.slice, ast.Constant)
        and isinstance(part.slice.value, str)
        and COUNTERS.search(part.slice.value) is not None
        for part in ast.walk(node)
    )


def _with_moments(roots: Sequence[Root]) -> Optimizer | None:
    """The only optimizer of the file, if it has a state of its own."""
    made: dict[int, Optimizer] = {}
    for root in roots:
        for node in walk(root.block):
            if isinstance(node, Event) and node.act is Act.MAKE:
                if not isinstance(node.subject, Optimizer):
                    return None
                made[id(node.subject.node)] = node.subject
    if len(made) != 1:
        return None
    (optimizer,) = made.values()
    call = optimizer.node
    keywords = {k.arg: k.value for k in call.keywords} if isinstance(call, ast.Call) else {}
    if optimizer.class_name == "SGD":
        momentum = keywords.get("momentum", ast.Constant(0))
        return None if isinstance(momentum, ast.Constant) and not momentum.value else optimizer
    return optimizer
