"""Say what an expression stands for, and note what happens while it is worked out."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence

from . import calling, known, methods
from .arithmetic import combine
from .asking import formula_of
from .call import Call
from .collecting import collected
from .conditions import FALSE, TRUE, negated
from .evaluator import text_of
from .forwards import crossing
from .joining import chosen
from .trace import Act, Block, Event, Loop, is_idle
from .values import (
    Bound,
    Class,
    Condition,
    Const,
    Context,
    Criterion,
    Function,
    Instance,
    Items,
    Kind,
    Loss,
    Module,
    Optimizer,
    Params,
    Scope,
    Torch,
    Unknown,
    Value,
    key_of,
)

__all__ = ["Expressions"]

CRITERION = ("criterion", "criteria", "loss_fn", "loss_func", "loss_function", "loss_fct", "lossfn")


class Expressions:
    """The part of the reader that works expressions out."""

    def __init__(self) -> None:
        self.scope = Scope()
        self.block = Block()
        self.loops: list[Loop] = []
        self.loop_count = 0
        self.modules: dict[str, Value] = {}
        self.unused: set[int] = set()  # expressions that are statements
        self.handlers: dict[type[ast.expr], Callable[..., Value]] = {
            ast.Name: self._name,
            ast.Constant: lambda node: Const(node.value),
            ast.Attribute: lambda node: self.attribute(self.evaluate(node.value), node.attr, node),
            ast.Call: self._call,
            ast.BinOp: self._binary,
            ast.UnaryOp: self._unary,
            ast.BoolOp: self._boolean,
            ast.Compare: lambda node: Condition(formula_of(self, node)),
            ast.IfExp: self._if,
            ast.Subscript: self._subscript,
            ast.Tuple: self._items,
            ast.List: self._items,
            ast.Set: self._items,
            ast.Dict: self._dict,
            ast.ListComp: self._comprehension,
            ast.GeneratorExp: self._comprehension,
            ast.SetComp: self._comprehension,
            ast.DictComp: self._dict_comprehension,
            ast.Lambda: lambda node: Function(node, self.scope),
            ast.NamedExpr: self._named,
            ast.Starred: lambda node: self.evaluate(node.value),
            ast.Await: lambda node: self.evaluate(node.value),
            ast.Yield: self._yield,
            ast.YieldFrom: self._yield,
            ast.JoinedStr: self._string,
        }

    def evaluate(self, node: ast.expr) -> Value:
        """Say what an expression stands for."""
        handler = self.handlers.get(type(node))
        return handler(node) if handler is not None else Unknown(text_of(node))

    def emit(
        self,
        act: Act,
        node: ast.AST,
        subject: Value | None = None,
        *,
        by: Value | None = None,
        calm: bool = False,
        spent: bool = False,
    ) -> None:
        """Note that something happens."""
        used = id(node) not in self.unused
        self.block.nodes.append(Event(act, node, subject, by, calm=calm, used=used, spent=spent))

    def is_used(self, node: ast.AST) -> bool:
        """Whether anything is done with what an expression gives."""
        return id(node) not in self.unused

    def num_loops(self) -> int:
        """How many loops are open."""
        return len(self.loops)

    def enter(
        self,
        function: Function,
        node: ast.AST,
        args: Sequence[Value],
        named: Mapping[str, Value],
        bound_to: Value | None = None,
    ) -> Value:
        """Walk through a function that is called."""
        raise NotImplementedError

    def made(self, cls: Value, node: ast.Call, args: Sequence[Value]) -> Instance | None:
        """Make an instance of a class of this file."""
        raise NotImplementedError

    def bind(self, target: ast.expr, value: Value) -> None:
        """Give a name its meaning."""
        raise NotImplementedError

    def module_of(self, value: Value) -> Value:
        """The same module for the same words."""
        if not isinstance(value, Unknown):
            return value
        return self.modules.setdefault(value.key, Module(value.key))

    def _name(self, node: ast.Name) -> Value:
        value = self.scope.get(node.id)
        if value is not None:
            return value
        return Torch(node.id) if calling.is_builtin(node.id) else Unknown(node.id)

    def attribute(self, owner: Value, name: str, node: ast.expr) -> Value:
        """Say what `owner.name` stands for."""
        if isinstance(owner, Torch):
            return Torch(f"{owner.name}.{name}")
        if isinstance(owner, Instance):
            return self._of_instance(owner, name)
        if isinstance(owner, Class):
            return owner.find(name) or Unknown(f"{owner.node.name}.{name}")
        if isinstance(owner, Module) and name == "module":
            return owner.inner if owner.inner is not None else owner
        if isinstance(owner, Loss) and name in {"data", "grad_fn"}:
            return owner.with_(detached=True)
        if name == "loss" and isinstance(owner, Unknown) and owner.is_result:
            return owner.loss or Loss(Kind.MEAN, node, roots=(owner,))
        if name in methods.BY_NAME and isinstance(owner, Module | Unknown | Optimizer):
            return Bound(owner, name)
        return Unknown(f"{key_of(owner)}.{name}")

    def _of_instance(self, owner: Instance, name: str) -> Value:
        if (value := owner.attributes.get(name)) is not None:
            return value
        member = owner.cls.find(name)
        if isinstance(member, Function):
            decorators = getattr(member.node, "decorator_list", [])
            if any(text_of(decorator).endswith("property") for decorator in decorators):
                return self.enter(member, member.node, [], {}, owner)
            return Bound(owner, name)
        if member is not None:
            return self.steady(name, member, f"{owner.key}.{name}")
        if name not in owner.sought:
            owner.sought.add(name)
            self.look_for(owner, name)
            if (value := owner.attributes.get(name)) is not None:
                return value
        return Unknown(f"{owner.key}.{name}")

    def steady(self, name: str, value: Value, key: str) -> Value:
        """A constant that other places may change is not one."""
        raise NotImplementedError

    def look_for(self, owner: Instance, name: str) -> None:
        """Read the method that sets an attribute which the constructor does not."""
        raise NotImplementedError

    def _call(self, node: ast.Call) -> Value:
        func = node.func
        target = self._method(func) if isinstance(func, ast.Attribute) else self.evaluate(func)
        args: list[Value] = []
        for argument in node.args:
            value = self.evaluate(argument)
            if isinstance(argument, ast.Starred) and isinstance(value, Items):
                args += value.items
            else:
                args.append(value)
        named = {
            keyword.arg: value
            for keyword in node.keywords
            for value in (self.evaluate(keyword.value),)
            if keyword.arg is not None
        }
        return self.call(target, Call(self, node, args, named))

    def _method(self, func: ast.Attribute) -> Value:
        if isinstance(func.value, ast.Call) and text_of(func.value.func) == "super":
            return self._super(func.attr)
        owner = self.evaluate(func.value)
        if isinstance(owner, Torch | Instance | Class):
            found = self.attribute(owner, func.attr, func)
            if not isinstance(found, Unknown):
                return found
        return Bound(owner, func.attr)

    def _super(self, name: str) -> Value:
        me = self.scope.get("self")
        if isinstance(me, Instance):
            for base in me.cls.bases:
                member = base.find(name) if isinstance(base, Class) else None
                if isinstance(member, Function):
                    return Bound(Instance(base, me.key, me.attributes), name)  # type: ignore[arg-type]
        return Unknown(f"super().{name}")

    def call(self, target: Value, call: Call) -> Value:
        """Say what a call gives."""
        node = call.node
        if isinstance(target, Function):
            return self.enter(target, node, call.args, call.named)
        if isinstance(target, Class):
            return self._instance(target, call)
        if isinstance(target, Torch):
            return calling.call_outside(call, target.name)
        if isinstance(target, Criterion):
            return calling.loss_of(call, target.class_name, target)
        if isinstance(target, Bound):
            return self._call_bound(target, call)
        if isinstance(target, Context):
            return target
        if isinstance(target, Instance):
            member = target.cls.find("__call__")
            if isinstance(member, Function):
                return self.enter(member, node, call.args, call.named, target)
        return self._call_unknown(target, call)

    def _call_bound(self, target: Bound, call: Call) -> Value:
        owner = target.owner
        if isinstance(owner, Instance):
            member = owner.cls.find(target.name)
            if isinstance(member, Function):
                return self.enter(member, call.node, call.args, call.named, owner)
            value = owner.attributes.get(target.name)
            if value is not None:
                return self.call(value, call)
        if target.name == "step":
            closure = call.get(0, "closure")
            if isinstance(closure, Function):
                self.enter(closure, call.node, [], {})
        if isinstance(owner, Unknown) and target.name in CRITERION:
            return Loss(Kind.MEAN, call.node, roots=tuple(call.args))
        if target.name not in methods.BY_NAME and known.is_model_name(target.name):
            self.emit(Act.FORWARD, call.node, Unknown(f"{key_of(owner)}.{target.name}"))
        return methods.call_method(call, target)

    def _call_unknown(self, target: Value, call: Call) -> Value:
        if isinstance(target, Module | Instance):
            self.emit(Act.FORWARD, call.node, target)
            return crossing(self, target, call) or Unknown(f"{key_of(target)}()", is_result=True)
        words = key_of(target)
        if words.rpartition(".")[2] in CRITERION:
            return Loss(Kind.MEAN, call.node, roots=tuple(call.args))
        if known.is_model_name(words.rpartition(".")[2]):
            self.emit(Act.FORWARD, call.node, target)
        calling.opaque(call)
        if known.is_bar(words) and call.args:
            return call.args[0]
        return Unknown(f"{words}()", is_result=True)

    def _instance(self, cls: Class, call: Call) -> Value:
        if any(root.rpartition(".")[2].endswith("Loss") for root in cls.roots()):
            return Criterion(Kind.OTHER, "", cls.node.name)
        if any(known.is_optimizer_class(root) for root in cls.roots()):
            return calling.optimizer_of(call, cls.node.name)
        made = self.made(cls, call.node, call.args)
        if made is None:
            return Unknown(f"{cls.node.name}()", is_result=True)
        member = cls.find("__init__")
        if isinstance(member, Function):
            self.enter(member, call.node, call.args, call.named, made)
        return made

    def _binary(self, node: ast.BinOp) -> Value:
        return combine(node.op, self.evaluate(node.left), self.evaluate(node.right), node)

    def _unary(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            return Condition(formula_of(self, node))
        value = self.evaluate(node.operand)
        if isinstance(node.op, ast.USub):
            if isinstance(value, Const) and isinstance(value.value, int | float):
                return Const(-value.value)
            if isinstance(value, Loss):
                return value
        return Unknown(text_of(node))

    def _boolean(self, node: ast.BoolOp) -> Value:
        values = [self.evaluate(value) for value in node.values]
        if any(isinstance(value, Condition) for value in values):
            return Condition(formula_of(self, node))
        if isinstance(node.op, ast.Or) and not isinstance(values[0], Const | Unknown):
            return values[0]
        return Unknown(text_of(node))

    def _if(self, node: ast.IfExp) -> Value:
        formula = formula_of(self, node.test)
        if formula in (TRUE, FALSE):
            return self.evaluate(node.body if formula == TRUE else node.orelse)
        first, second = self.evaluate(node.body), self.evaluate(node.orelse)
        if isinstance(first, Const) and first.value is True and isinstance(second, Const):
            return Condition(formula) if second.value is False else Unknown(text_of(node))
        if isinstance(first, Const) and first.value is False and isinstance(second, Const):
            return Condition(negated(formula)) if second.value is True else Unknown(text_of(node))
        return chosen(formula, first, second, text_of(node))

    def _subscript(self, node: ast.Subscript) -> Value:
        owner = self.evaluate(node.value)
        index = self.evaluate(node.slice) if not isinstance(node.slice, ast.Slice) else None
        if isinstance(owner, Items) and isinstance(index, Const):
            if owner.keys is not None and index.value in owner.keys:
                return owner.items[owner.keys.index(index.value)]
            if isinstance(index.value, int) and -len(owner.items) <= index.value < len(owner.items):
                return owner.items[index.value]
        if isinstance(owner, Loss):
            return owner
        parts = owner.parts if isinstance(owner, Module) else ()
        if isinstance(index, Const) and index.value in range(-len(parts), len(parts)):
            return parts[int(index.value)]
        return Unknown(f"{key_of(owner)}[{text_of(node.slice)}]")

    def _items(self, node: ast.Tuple | ast.List | ast.Set) -> Value:
        values: list[Value] = []
        for part in node.elts:
            value = self.evaluate(part)
            if isinstance(part, ast.Starred) and isinstance(value, Params):
                value.used_up = value.used_up or value.one_shot
            values.append(value)
        if values and all(isinstance(value, Params) for value in values):
            joined = calling.params_of(self, Items(values))
            if isinstance(joined, Params):
                joined.node = node
                return joined
        return Items(values, is_list=isinstance(node, ast.List))

    def _dict(self, node: ast.Dict) -> Value:
        keys: list[str] = []
        values: list[Value] = []
        for key, value in zip(node.keys, node.values, strict=True):
            worth = self.evaluate(value)
            keys.append(str(key.value) if isinstance(key, ast.Constant) else "")
            values.append(worth)
        if "params" in keys:
            return calling.params_of(self, values[keys.index("params")])
        return Items(values, keys)

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Value:
        first = node.generators[0]
        over = self.evaluate(first.iter)
        outer, self.scope = self.scope, Scope(self.scope)
        block, self.block = self.block, Block()
        self.bind(first.target, Unknown(text_of(first.target)))
        for generator in node.generators[1:]:
            self.evaluate(generator.iter)
            self.bind(generator.target, Unknown(text_of(generator.target)))
        for generator in node.generators:
            for test in generator.ifs:
                self.evaluate(test)
        element = self.evaluate(node.elt)
        self.scope = outer
        body, self.block = self.block, block
        if not is_idle(body):
            self.loop_count += 1
            self.block.nodes.append(Loop(body, node, self.loop_count, over))
        return collected(node, over, element, self.num_loops())

    def _dict_comprehension(self, node: ast.DictComp) -> Value:
        self.evaluate(node.generators[0].iter)
        return Unknown(text_of(node))

    def _named(self, node: ast.NamedExpr) -> Value:
        value = self.evaluate(node.value)
        self.bind(node.target, value)
        return value

    def _yield(self, node: ast.Yield | ast.YieldFrom) -> Value:
        if node.value is not None:
            self.evaluate(node.value)
        return Unknown("yielded")

    def _string(self, node: ast.JoinedStr) -> Value:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.evaluate(part.value)
        return Unknown("text")
