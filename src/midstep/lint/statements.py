"""What each kind of statement does to the names, and what it adds to the tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from .arithmetic import combine
from .asking import formula_of
from .conditions import FALSE, TRUE, Ask, Atom, Topic
from .evaluator import text_of
from .joining import chosen, either_context, join_names
from .known import clips_by_hand
from .looping import for_loop, while_loop
from .trace import Act, Attempt, Block, Branch, Exit, Region, is_idle
from .values import (
    Class,
    Const,
    Context,
    Function,
    Instance,
    Inverse,
    Loss,
    Module,
    Params,
    Scope,
    Torch,
    Unknown,
    Value,
    Wrap,
    key_of,
)

if TYPE_CHECKING:
    from .reading import Reader

__all__ = ["STATEMENTS"]

SWITCHES = {"require_backward_grad_sync", "require_forward_param_sync"}
GRAPHLESS = re.compile(r"(^|\.)(no_grad|inference_mode)\(|set_grad_enabled\(False\)")
ASKS_FINITE = re.compile(r"nan_to_num|isnan|isinf|isfinite")


def _expression(reader: Reader, node: ast.Expr) -> bool:
    reader.unused.add(id(node.value))
    reader.evaluate(node.value)
    return False


def _assign(reader: Reader, node: ast.Assign) -> bool:
    value = reader.evaluate(node.value)
    for target in node.targets:
        if _on_gradient(target):
            _gradient_assigned(reader, node, target, value)
        else:
            _kept(reader, node, target, value)
            _rebuilt(reader, node, target, value)
            if isinstance(target, ast.Attribute) and target.attr in SWITCHES:
                reader.emit(Act.SYNC, node, value)
            reader.bind(target, value)
    return False


def _annotated(reader: Reader, node: ast.AnnAssign) -> bool:
    if node.value is not None:
        reader.bind(node.target, reader.evaluate(node.value))
    return False


def _on_gradient(target: ast.expr) -> bool:
    if isinstance(target, ast.Subscript):
        target = target.value
    return isinstance(target, ast.Attribute) and (
        target.attr == "grad" or (target.attr == "data" and text_of(target).endswith("grad.data"))
    )


def _gradient_assigned(reader: Reader, node: ast.Assign, target: ast.expr, value: Value) -> None:
    words = text_of(target)
    if isinstance(value, Const) and isinstance(target, ast.Subscript):
        _some_assigned(reader, node, target)
    elif isinstance(value, Const):
        reader.emit(Act.ZERO, node, Unknown("p.grad"))
    elif isinstance(node.value, ast.BinOp) and _scales(node.value, words):
        act = Act.CLIP if clips_by_hand(text_of(node.value)) else Act.DIVIDE
        reader.emit(act, node, Unknown("p.grad"), by=reader.evaluate(node.value.right))
    elif ASKS_FINITE.search(text_of(node.value)):
        reader.emit(Act.REPLACE, node, Unknown("p.grad"))
    else:
        reader.emit(Act.FILL, node, Unknown("p.grad"))


def _some_assigned(reader: Reader, node: ast.Assign, target: ast.Subscript) -> None:
    """`p.grad[bad] = 0.0` replaces, `p.grad[:] = 0` clears, `p.grad[:9] = 0` freezes some rows."""
    is_slice = isinstance(target.slice, ast.Slice)
    asked = text_of(target.slice)
    asked += "" if is_slice else f" {key_of(reader.evaluate(target.slice))}"
    if ASKS_FINITE.search(asked):
        reader.emit(Act.REPLACE, node, Unknown("p.grad"))
    elif text_of(target.slice) in {":", "..."}:
        reader.emit(Act.ZERO, node, Unknown("p.grad"))


def _scales(value: ast.BinOp, words: str) -> bool:
    """`p.grad = p.grad / k`, and not `p.grad = total / k`."""
    is_scaled = isinstance(value.op, ast.Div | ast.Mult)
    return is_scaled and words in {text_of(value.left), text_of(value.right)}


def _rebuilt(reader: Reader, node: ast.Assign, target: ast.expr, value: Value) -> None:
    """`model = Model()` once more, `model.head = nn.Linear(...)`, `model[2] = ...`."""
    is_sharded = isinstance(value, Module) and value.wrap is Wrap.SHARDED
    is_new = isinstance(value, Module | Instance) and value.key.endswith("(")
    if not (is_new or is_sharded):
        return
    before: Value | None = None
    if isinstance(target, ast.Name):
        before = reader.scope.names.get(target.id)
        if isinstance(value, Module) and before in value.parts:
            return
    elif isinstance(target, ast.Attribute | ast.Subscript):
        before = Unknown(text_of(target))
    if isinstance(before, Module | Instance | Unknown):
        reader.emit(Act.REBUILD, node, before)


def _kept(reader: Reader, node: ast.Assign, target: ast.expr, value: Value) -> None:
    """`total = total + loss`."""
    right = node.value
    is_sum = isinstance(right, ast.BinOp) and isinstance(right.op, ast.Add)
    if not is_sum or not isinstance(right, ast.BinOp) or text_of(right.left) != text_of(target):
        return
    added = reader.evaluate(right.right) if isinstance(value, Loss) else None
    if isinstance(added, Loss) and not added.detached and not reader.num_graphless:
        reader.emit(Act.KEEP, node, added, by=value)


def _augmented(reader: Reader, node: ast.AugAssign) -> bool:
    value = reader.evaluate(node.value)
    if _on_gradient(node.target):
        by = Inverse(value) if isinstance(node.op, ast.Mult) else value
        act = Act.CLIP if clips_by_hand(text_of(node.value)) else Act.DIVIDE
        reader.emit(act, node, Unknown("p.grad"), by=by)
        return False
    load = _as_read(node.target)
    before = reader.evaluate(load)
    if isinstance(before, Params):
        before.whole = False
        return False
    words = ast.copy_location(ast.BinOp(load, node.op, node.value), node)
    after = combine(node.op, before, value, words)
    is_sum = isinstance(node.op, ast.Add) and not reader.num_graphless
    if is_sum and isinstance(value, Loss) and not value.detached:
        reader.emit(Act.KEEP, node, value, by=after)
    reader.bind(node.target, after)
    return False


def _as_read(target: ast.expr) -> ast.expr:
    if isinstance(target, ast.Name):
        return ast.copy_location(ast.Name(target.id, ast.Load()), target)
    if isinstance(target, ast.Attribute):
        return ast.copy_location(ast.Attribute(target.value, target.attr, ast.Load()), target)
    assert isinstance(target, ast.Subscript)
    return ast.copy_location(ast.Subscript(target.value, target.slice, ast.Load()), target)


def _if(reader: Reader, node: ast.If) -> bool:
    words = text_of(node.test)
    if "__name__" in words:
        return reader.walk(node.body)
    formula = FALSE if words == "TYPE_CHECKING" else formula_of(reader, node.test)
    if formula == TRUE:
        return reader.walk(node.body)
    if formula == FALSE:
        return reader.walk(node.orelse)
    scope, block = reader.scope, reader.block
    before = scope.names
    scope.names, reader.block = dict(before), Block()
    body_ends = reader.walk(node.body)
    body, after_body = reader.block, scope.names
    scope.names, reader.block = dict(before), Block()
    else_ends = reader.walk(node.orelse)
    orelse, after_else = reader.block, scope.names
    scope.names, reader.block = before, block
    if not (is_idle(body) and is_idle(orelse)):
        reader.block.nodes.append(Branch(formula, body, orelse, node))
    if body_ends != else_ends:
        scope.names = after_else if body_ends else after_body
    else:
        for name in after_body.keys() & after_else.keys():
            one, other = after_body[name], after_else[name]
            if one is not other and either_context(one, other):
                after_body[name] = after_else[name] = chosen(formula, one, other, name)
        join_names(scope.names, after_body, after_else)
    return body_ends and else_ends


def _with(reader: Reader, node: ast.With | ast.AsyncWith) -> bool:
    contexts: list[Context] = []
    for item in node.items:
        value = reader.evaluate(item.context_expr)
        if isinstance(value, Context):
            contexts.append(value)
        if item.optional_vars is not None:
            reader.bind(item.optional_vars, _entered(reader, item.context_expr, value))
    outer = reader.block
    if contexts:
        reader.block = Block()
    is_graphless = any(GRAPHLESS.search(text_of(item.context_expr)) for item in node.items)
    reader.num_graphless += is_graphless
    ends = reader.walk(node.body)
    reader.num_graphless -= is_graphless
    if contexts:
        body: Block = reader.block
        for context in reversed(contexts):
            body = Block([Region(context, body, node)])
        reader.block = outer
        if not is_idle(body):
            reader.block.nodes += body.nodes
    return ends


def _entered(reader: Reader, node: ast.expr, value: Value) -> Value:
    if isinstance(node, ast.Call) and text_of(node.func).endswith("scale_loss") and node.args:
        return reader.evaluate(node.args[0])
    return value


def _try(reader: Reader, node: ast.Try) -> bool:
    outer, body = reader.block, Block()
    reader.block = body
    ends = reader.walk(node.body)
    handlers = []
    before = reader.scope.names
    for handler in node.handlers:
        reader.scope.names, reader.block = dict(before), Block()
        reader.walk(handler.body)
        handlers.append((handler, reader.block))
    reader.scope.names, after = before, Block()
    reader.block = after
    if not ends:
        ends = reader.walk(node.orelse)
    ends = reader.walk(node.finalbody) or ends
    reader.block = outer
    attempt = Attempt(body, handlers, after, node)
    if not (is_idle(body) and is_idle(after) and all(is_idle(block) for _, block in handlers)):
        reader.block.nodes.append(attempt)
    return ends and not node.handlers


def _return(reader: Reader, node: ast.Return) -> bool:
    value = reader.evaluate(node.value) if node.value is not None else Const(None)
    if reader.results:
        reader.results[-1].append(value)
    reader.block.nodes.append(Exit("return", node))
    return True


def _exit(word: str) -> Callable[[Reader, ast.stmt], bool]:
    def leave(reader: Reader, node: ast.stmt) -> bool:
        reader.block.nodes.append(Exit(word, node))
        return True

    return leave


def _import(reader: Reader, node: ast.Import) -> bool:
    for alias in node.names:
        if alias.asname is not None:
            reader.scope.names[alias.asname] = Torch(alias.name)
        else:
            top = alias.name.partition(".")[0]
            reader.scope.names[top] = Torch(top)
    return False


def _import_from(reader: Reader, node: ast.ImportFrom) -> bool:
    for alias in node.names:
        if alias.name != "*":
            name = f"{node.module}.{alias.name}" if node.module else alias.name
            reader.scope.names[alias.asname or alias.name] = Torch(name)
    return False


def _function(reader: Reader, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    reader.scope.names[node.name] = Function(node, reader.scope)
    return False


def _class(reader: Reader, node: ast.ClassDef) -> bool:
    known = reader.scope.names.get(node.name)
    if isinstance(known, Class) and known.node is node:
        return False
    bases = tuple(reader.evaluate(base) for base in node.bases)
    cls = Class(node, reader.scope, bases, {})
    outer, reader.scope = reader.scope, Scope(reader.scope)
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            method = Function(statement, outer, cls)
            cls.members[statement.name] = method
            for name in _attributes_stored(statement):
                cls.writers.setdefault(name, []).append(method)
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.ClassDef):
            reader.walk([statement])
    cls.members.update({n: v for n, v in reader.scope.names.items() if n not in cls.members})
    reader.scope = outer
    reader.scope.names[node.name] = cls
    return False


def _attributes_stored(function: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _match(reader: Reader, node: ast.Match) -> bool:
    subject = reader.evaluate(node.subject)
    for number, case in enumerate(node.cases):
        outer, reader.block = reader.block, Block()
        reader.walk(case.body)
        body, reader.block = reader.block, outer
        if not is_idle(body):
            asked = Ask(Atom(Topic.OTHER, f"{key_of(subject)} matches {number}"))
            reader.block.nodes.append(Branch(asked, body, Block(), case.body[0]))
    return False


def _assert(reader: Reader, node: ast.Assert) -> bool:
    reader.evaluate(node.test)
    return False


STATEMENTS: dict[type[ast.stmt], Callable[..., bool]] = {
    ast.Expr: _expression,
    ast.Assign: _assign,
    ast.AnnAssign: _annotated,
    ast.AugAssign: _augmented,
    ast.If: _if,
    ast.For: for_loop,
    ast.AsyncFor: for_loop,
    ast.While: while_loop,
    ast.With: _with,
    ast.AsyncWith: _with,
    ast.Try: _try,
    ast.Return: _return,
    ast.Continue: _exit("continue"),
    ast.Break: _exit("break"),
    ast.Raise: _exit("raise"),
    ast.Import: _import,
    ast.ImportFrom: _import_from,
    ast.FunctionDef: _function,
    ast.AsyncFunctionDef: _function,
    ast.ClassDef: _class,
    ast.Match: _match,
    ast.Assert: _assert,
}
