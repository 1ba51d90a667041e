"""Read a file in order, as Python would run it, and write down what its training loops do.

Functions and methods of the file are entered where they are called; what nobody calls is read by
itself, as if somebody called it again and again.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .evaluator import text_of
from .expressions import Expressions
from .joining import join
from .statements import STATEMENTS
from .surroundings import Names, names_of
from .trace import Act, Block, Inlined, Loop, is_idle
from .values import (
    Accelerator,
    Class,
    Const,
    Function,
    Index,
    Instance,
    Items,
    Module,
    Optimizer,
    Scaler,
    Schedule,
    Scope,
    Unknown,
    Value,
)

__all__ = ["Root", "read_loops"]

DEEPEST = 10  # calls inside calls
MOST_STATEMENTS = 20_000  # of one root, functions that are entered included
MOST_VISITS = 12  # of one function from one root


class Root(NamedTuple):
    """What one part of the file does, read from its beginning, and the functions it entered."""

    block: Block
    name: str
    entered: frozenset[ast.AST] = frozenset()


def read_loops(tree: ast.Module) -> list[Root]:
    """Read a file.

    Args:
        tree: Its syntax tree.

    Returns:
        What the module does when it is run, and each function that nobody in the file calls.
    """
    return Reader(names_of(tree)).read(tree)


class Reader(Expressions):
    """Walks through statements."""

    def __init__(self, names: Names) -> None:
        super().__init__()
        self.names = names
        self.entered: set[ast.AST] = set()
        self.calls: list[ast.AST] = []
        self.visits: Counter[ast.AST] = Counter()
        self.statements = 0
        self.num_graphless = 0  # open contexts in which nothing knows how it was made
        self.results: list[list[Value]] = []
        self.instances: dict[ast.ClassDef, Instance] = {}

    def read(self, tree: ast.Module) -> list[Root]:
        """Read the module, then what it did not call."""
        self.scope = Scope()
        for node in self.names.definitions:
            self.define(node)
        self.walk(tree.body)
        roots = [Root(self.block, "module", frozenset(self.visits))]
        module = self.scope
        for function, owner in self.names.functions:
            if function in self.entered:
                continue
            self.scope = module
            self.block = Block()
            self.statements = 0
            self.visits.clear()
            self.alone(function, owner)
            roots.append(Root(self.block, function.name, frozenset(self.visits)))
        return roots

    def alone(self, function: ast.FunctionDef | ast.AsyncFunctionDef, owner: list[str]) -> None:
        """Read a function that nobody calls, as the body of a loop."""
        bound_to: Value | None = None
        value = self.scope.get(owner[0]) if owner else self.scope.get(function.name)
        if owner:
            if not isinstance(value, Class) or len(owner) > 1:
                return
            bound_to = self.instances.get(value.node) or self._first_instance(value)
            value = value.find(function.name)
        if not isinstance(value, Function) or value.node is not function:
            value = Function(function, self.scope)
        names = [argument.arg for argument in function.args.args]
        skipped = 1 if bound_to is not None and names[:1] in (["self"], ["cls"]) else 0
        args = [Unknown(name) for name in names[skipped:]]
        self.loop_count += 1
        outer, self.block = self.block, Block()
        loop = Loop(self.block, function, self.loop_count, is_called=True)
        only = {argument.arg: Unknown(argument.arg) for argument in function.args.kwonlyargs}
        self.enter(value, function, args, only, bound_to)
        self.block = outer
        self.block.nodes.append(loop)

    def _first_instance(self, cls: Class) -> Instance:
        made = Instance(cls, "self")
        self.instances[cls.node] = made
        member = cls.find("__init__")
        if isinstance(member, Function):
            quiet, self.block = self.block, Block()
            names = [argument.arg for argument in member.node.args.args[1:]]
            only = [argument.arg for argument in member.node.args.kwonlyargs]
            named: dict[str, Value] = {name: Unknown(name) for name in only}
            self.enter(member, member.node, [Unknown(name) for name in names], named, made)
            self.block = quiet
        return made

    def walk(self, statements: Sequence[ast.stmt]) -> bool:
        """Walk through statements; True when none after them is reached."""
        for statement in statements:
            self.statements += 1
            if self.statements > MOST_STATEMENTS:
                return False
            handler = STATEMENTS.get(type(statement))
            if handler is not None and handler(self, statement):
                return True
        return False

    def define(self, node: ast.stmt) -> None:
        """Make an import, a function or a class known."""
        handler = STATEMENTS.get(type(node))
        if handler is not None:
            handler(self, node)

    def bind(self, target: ast.expr, value: Value) -> None:
        """Give a name, an attribute or several of them their meaning."""
        if isinstance(target, ast.Name):
            _call_it(value, target.id)
            self.scope.names[target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self.evaluate(target.value)
            if isinstance(owner, Instance):
                _call_it(value, f"{owner.key}.{target.attr}")
                key = f"{owner.key}.{target.attr}"
                owner.attributes[target.attr] = self.steady(target.attr, value, key)
            elif isinstance(owner, Unknown) and target.attr == "loss":
                owner.loss = value
        elif isinstance(target, ast.Tuple | ast.List):
            for number, part in enumerate(target.elts):
                inner: Value = Unknown(text_of(part))
                if isinstance(value, Items) and number < len(value.items):
                    inner = value.items[number]
                self.bind(part.value if isinstance(part, ast.Starred) else part, inner)

    def steady(self, name: str, value: Value, key: str) -> Value:
        """A constant that other places may change is a counter, or not known."""
        if not isinstance(value, Const) or value.value is None:
            return value
        if name in self.names.increased:
            start = value.value if type(value.value) is int else None
            return Index(key, -2, start, survives=True, resets=self.names.stored[name] > 1)
        return value if self.names.stored[name] <= 1 else Unknown(key)

    def look_for(self, owner: Instance, name: str) -> None:
        """Read the method that sets an attribute which the constructor does not."""
        for function in owner.cls.written_by(name)[:1]:
            if function.node in self.calls:
                return
            quiet, self.block = self.block, Block()
            self.enter(function, function.node, [], {}, owner)
            self.block = quiet

    def made(self, cls: Value, node: ast.Call, args: Sequence[Value]) -> Instance | None:
        """Make an instance of a class of this file."""
        if not isinstance(cls, Class):
            return None
        instance = Instance(cls, f"{cls.node.name}(")
        self.instances.setdefault(cls.node, instance)
        return instance

    def enter(
        self,
        function: Function,
        node: ast.AST,
        args: Sequence[Value],
        named: Mapping[str, Value],
        bound_to: Value | None = None,
    ) -> Value:
        """Walk through a function that is called, and say what it returns."""
        body = function.node
        if isinstance(body, ast.Lambda):
            return self._enter_lambda(function, body, args)
        too_deep = len(self.calls) >= DEEPEST or body in self.calls
        if too_deep or self.visits[body] >= MOST_VISITS:
            self.emit(Act.UNKNOWN, node, bound_to)
            return Unknown(f"{body.name}()")
        self.visits[body] += 1
        self.entered.add(body)
        outer_scope, outer_block = self.scope, self.block
        self.scope, self.block = Scope(function.scope), Block()
        self._bind_arguments(body, args, named, bound_to, function)
        self.calls.append(body)
        self.results.append([])
        self.walk(body.body)
        results = self.results.pop()
        self.calls.pop()
        inner, self.block, self.scope = self.block, outer_block, outer_scope
        if not is_idle(inner):
            self.block.nodes.append(Inlined(inner, node))
        if not results:
            return Unknown(f"{body.name}()")
        value = results[0]
        for other in results[1:]:
            value = join(value, other, f"{body.name}()")
        return value

    def _enter_lambda(self, function: Function, body: ast.Lambda, args: Sequence[Value]) -> Value:
        if len(self.calls) >= DEEPEST or body in self.calls:
            return Unknown("lambda()")
        self.calls.append(body)
        outer, self.scope = self.scope, Scope(function.scope)
        for argument, value in zip(body.args.args, args, strict=False):
            self.scope.names[argument.arg] = value
        result = self.evaluate(body.body)
        self.scope = outer
        self.calls.pop()
        return result

    def _bind_arguments(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef,
        args: Sequence[Value],
        named: Mapping[str, Value],
        bound_to: Value | None,
        function: Function,
    ) -> None:
        names = self.scope.names
        parameters = [*node.args.posonlyargs, *node.args.args]
        given = list(args)
        decorators = {text_of(decorator) for decorator in node.decorator_list}
        if bound_to is not None and "staticmethod" not in decorators:
            given.insert(0, bound_to)
        defaults = node.args.defaults
        for parameter, default in zip(parameters[-len(defaults) :], defaults, strict=False):
            names[parameter.arg] = self.evaluate(default)
        for parameter, default_or_none in zip(
            node.args.kwonlyargs, node.args.kw_defaults, strict=True
        ):
            if default_or_none is not None:
                names[parameter.arg] = self.evaluate(default_or_none)
        for parameter, value in zip(parameters, given, strict=False):
            names[parameter.arg] = value
        for parameter in (*parameters, *node.args.kwonlyargs):
            if parameter.arg in named:
                names[parameter.arg] = named[parameter.arg]
            names.setdefault(parameter.arg, Unknown(parameter.arg))
        if node.args.vararg is not None:
            names[node.args.vararg.arg] = Items(given[len(parameters) :])
        if node.args.kwarg is not None:
            names[node.args.kwarg.arg] = Unknown(node.args.kwarg.arg)


def _call_it(value: Value, name: str) -> None:
    """An object is known by the first name it is given."""
    if isinstance(value, Unknown) and value.is_result and not value.is_named:
        value.key, value.is_named = name, True
    named = (Module, Optimizer, Scaler, Schedule, Accelerator, Instance)
    if isinstance(value, named) and value.key.endswith("("):
        value.key = name
