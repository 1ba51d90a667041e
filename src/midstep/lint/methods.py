"""Methods of optimizers, scalers, schedules, losses and models, and of what only looks like one."""

from __future__ import annotations

import ast
from collections.abc import Callable

from . import known
from .arithmetic import divided, multiplied
from .asking import formula_of
from .call import Call, use_up
from .calling import clip, opaque
from .evaluator import text_of
from .gradients import in_full, is_squared_gradient
from .trace import Act
from .values import (
    Accelerator,
    Bound,
    Condition,
    Const,
    Context,
    Instance,
    Inverse,
    Items,
    Kind,
    Length,
    Loss,
    Module,
    Optimizer,
    Params,
    Scaled,
    Scaler,
    ScaleRead,
    Schedule,
    Torch,
    Unknown,
    Value,
    key_of,
)

__all__ = ["call_method"]


def call_method(call: Call, bound: Bound) -> Value:
    """Say what `owner.name(...)` stands for, and note what happens in it.

    Args:
        call: The call.
        bound: The method and its owner.
    """
    handler = BY_NAME.get(bound.name)
    if handler is not None:
        return handler(call, bound.owner)
    if bound.name in known.PASSED_ON:
        return _passed_on(call, bound)
    if bound.name in known.CLIPS:
        return _clip(call, bound.owner)
    _unseen(call, bound)
    return Unknown(text_of(call.node), is_result=True)


def _clip(call: Call, owner: Value) -> Value:
    """`accelerator.clip_grad_norm_(params, limit)`, or `model.clip_grad_norm_(limit)` of FSDP."""
    first = call.args[0] if call.args else None
    if len(call.args) > 1 or isinstance(first, Params | Items):
        return clip(call, by=owner)
    params = Params((call.reader.module_of(owner),), one_shot=False)
    call.reader.emit(Act.CLIP, call.node, params, by=owner)
    return Unknown("norm")


def _unseen(call: Call, bound: Bound) -> None:
    owner = bound.owner
    if isinstance(owner, Instance) and known.OPAQUE_WORDS.search(bound.name.lower()):
        call.reader.emit(Act.UNKNOWN, call.node, owner)
    elif isinstance(owner, Optimizer) and bound.name not in {"state_dict", "load_state_dict"}:
        if known.OPAQUE_WORDS.search(bound.name.lower()):
            call.reader.emit(Act.UNKNOWN, call.node, owner)
    else:
        opaque(call)


def _passed_on(call: Call, bound: Bound) -> Value:
    owner = bound.owner
    if bound.name == "cpu" and isinstance(owner, Loss):
        call.reader.emit(Act.READ, call.node, owner)
    if isinstance(owner, Unknown) and bound.name == "nan_to_num" and ".grad" in owner.key:
        call.reader.emit(Act.REPLACE, call.node, owner)
    if isinstance(owner, Module | Instance | Unknown) and _is_half(call, bound.name):
        call.reader.emit(Act.HALF, call.node, call.reader.module_of(owner))
    return owner


def _is_half(call: Call, name: str) -> bool:
    if name in {"half", "bfloat16"}:
        return not call.args
    given = {key_of(value) for value in (*call.args, *call.named.values())}
    return bool(given & {"torch.bfloat16", "torch.float16", "torch.half"})


def _backward(call: Call, owner: Value) -> Value:
    """`loss.backward()`, `scaler.scale(loss).backward()`, `accelerator.backward(loss)`."""
    first = call.args[0] if call.args else None
    is_through = isinstance(owner, Accelerator) or (
        first is not None and known.is_trainer_key(key_of(owner))
    )
    if is_through or (first is not None and isinstance(first, Loss | Scaled)):
        subject, by = first, owner
    elif isinstance(owner, Scaled):
        subject, by = owner.loss, owner.scaler
    else:
        subject, by = owner, None
    call.reader.emit(Act.BACKWARD, call.node, subject, by=by)
    return Const(None)


def _step(call: Call, owner: Value) -> Value:
    key = key_of(owner)
    first = call.args[0] if call.args else None
    if isinstance(owner, Scaler) or (known.is_scaler_key(key) and first is not None):
        call.reader.emit(Act.STEP, call.node, first, by=owner)
        return Const(None)
    if isinstance(owner, Schedule) or (
        not isinstance(owner, Optimizer) and known.is_schedule_key(key)
    ):
        call.reader.emit(Act.TICK, call.node, owner, calm=bool(call.args or call.named))
        return Const(None)
    if isinstance(owner, Optimizer) or known.is_optimizer_key(key):
        closure = call.get(0, "closure")
        call.reader.emit(Act.STEP, call.node, owner, by=closure)
        return Unknown("loss")
    _unseen(call, Bound(owner, "step"))
    return Unknown(text_of(call.node))


def _zero_grad(call: Call, owner: Value) -> Value:
    call.reader.emit(Act.ZERO, call.node, owner)
    return Const(None)


def _unscale(call: Call, owner: Value) -> Value:
    call.reader.emit(Act.UNSCALE, call.node, call.get(0, "optimizer"), by=owner)
    return Const(None)


def _scale(call: Call, owner: Value) -> Value:
    loss = call.get(0, "outputs")
    if isinstance(owner, Scaler) or known.is_scaler_key(key_of(owner)):
        return Scaled(loss or Unknown("?"), owner)
    return Unknown(text_of(call.node))


def _update(call: Call, owner: Value) -> Value:
    if isinstance(owner, Scaler) or known.is_scaler_key(key_of(owner)):
        call.reader.emit(Act.UPDATE, call.node, owner, calm=bool(call.args or call.named))
        return Const(None)
    _unseen(call, Bound(owner, "update"))
    return Unknown(text_of(call.node))


def _parameters(call: Call, owner: Value) -> Value:
    if isinstance(owner, Torch):
        return Unknown(f"{owner.name}.parameters()")
    module = call.reader.module_of(owner)
    return Params((module,), one_shot=True, node=call.node, born_in=call.reader.num_loops())


def _item(call: Call, owner: Value) -> Value:
    call.reader.emit(Act.READ, call.node, owner)
    return Unknown("number")


def _no_sync(call: Call, owner: Value) -> Value:
    call.reader.emit(Act.SYNC, call.node, owner)
    subject = owner
    if isinstance(owner, Accelerator) or known.is_trainer_key(key_of(owner)):
        subject = call.get(0, "model") or owner
    return Context("no_sync", subject)


def _no_backward_sync(call: Call, owner: Value) -> Value:
    """Fabric's, which has a switch: `no_backward_sync(model, enabled=is_accumulating)`."""
    node = call.node.args[1] if len(call.node.args) > 1 else None
    node = next((k.value for k in call.node.keywords if k.arg == "enabled"), node)
    formula = formula_of(call.reader, node) if node is not None else None
    return Context("no_sync", call.get(0, "module") or owner, formula)


def _accumulate(call: Call, owner: Value) -> Value:
    if isinstance(owner, Accelerator) or known.is_trainer_key(key_of(owner)):
        return Context("accumulate", owner)
    return Unknown(text_of(call.node))


def _prepare(call: Call, owner: Value) -> Value:
    """Accelerate gives back what it was given, wrapped."""
    if isinstance(owner, Accelerator) or known.is_trainer_key(key_of(owner)):
        for value in call.args:
            if isinstance(value, Optimizer):
                value.prepared = True
        return Items(call.args) if len(call.args) != 1 else call.args[0]
    return Unknown(text_of(call.node))


def _reduced(kind: Kind) -> Callable[[Call, Value], Value]:
    def reduce(call: Call, owner: Value) -> Value:
        if kind is Kind.SUM and is_squared_gradient(call.reader, call.node.func):
            call.reader.emit(Act.NORM, call.node, owner)
        is_partial = kind is Kind.SUM and bool(call.args or {"dim", "axis"} & call.named.keys())
        if isinstance(owner, Loss):
            if kind is Kind.MEAN and (owner.reduced or owner.kind is Kind.MEAN):
                return owner
            return owner.with_(kind=Kind.OTHER if is_partial else kind)
        is_count = isinstance(owner, Condition)  # `(labels != -100).sum()` has no graph
        return Loss(
            Kind.OTHER if is_partial else kind, call.node, roots=(owner,), detached=is_count
        )

    return reduce


def _divide(call: Call, owner: Value) -> Value:
    divisor = call.get(0, "other") or Unknown("?")
    if _is_gradient(call):
        _rescaled(call, owner, divisor)
        return owner
    return divided(owner, divisor, call.node)


def _multiply(call: Call, owner: Value) -> Value:
    factor = call.get(0, "other") or Unknown("?")
    if _is_gradient(call):
        _rescaled(call, owner, Inverse(factor))
        return owner
    return multiplied(owner, factor, call.node)


def _rescaled(call: Call, owner: Value, by: Value) -> None:
    words = " ".join(map(text_of, call.node.args))
    act = Act.CLIP if known.clips_by_hand(words) else Act.DIVIDE
    call.reader.emit(act, call.node, owner, by=by)


def _is_gradient(call: Call) -> bool:
    func = call.node.func
    return isinstance(func, ast.Attribute) and ".grad" in f"{text_of(func.value)}."


def _append(call: Call, owner: Value) -> Value:
    value = call.args[0] if call.args else None
    if isinstance(owner, Items) and owner.is_list and value is not None:
        owner.items.append(value)
    if isinstance(owner, Params):
        owner.whole = False
    if isinstance(value, Loss) and not value.detached:
        call.reader.emit(Act.KEEP, call.node, value)
    return Const(None)


def _extend(call: Call, owner: Value) -> Value:
    for value in call.args:
        use_up(value)
    if isinstance(owner, Items) and owner.is_list:
        owner.items += call.args
    return Const(None)


def _detached(call: Call, owner: Value) -> Value:
    if isinstance(owner, Loss):
        return owner.with_(detached=True)
    return owner


def _replace(call: Call, owner: Value) -> Value:
    if _is_gradient(call):
        call.reader.emit(Act.REPLACE, call.node, owner)
    return owner


def _zero(call: Call, owner: Value) -> Value:
    func = call.node.func
    is_part = isinstance(func, ast.Attribute) and isinstance(func.value, ast.Subscript)
    if _is_gradient(call) and not is_part:
        call.reader.emit(Act.ZERO, call.node, Unknown("p.grad"))
    return owner


def _fill(call: Call, owner: Value) -> Value:
    if _is_gradient(call):
        call.reader.emit(Act.FILL, call.node, Unknown("p.grad"))
    return owner


def _norm(call: Call, owner: Value) -> Value:
    if ".grad" in f"{in_full(call.reader, call.node.func)}.":
        call.reader.emit(Act.NORM, call.node, owner)
    return Unknown("norm")


def _size(call: Call, owner: Value) -> Value:
    return Length(owner)


def _replay(call: Call, owner: Value) -> Value:
    """A recorded CUDA graph does again whatever was recorded."""
    if not call.args and not call.named:
        call.reader.emit(Act.UNKNOWN, call.node, owner)
    return Const(None)


def _get_scale(call: Call, owner: Value) -> Value:
    return ScaleRead()


def _transposed(call: Call, owner: Value) -> Value:
    return owner


def _add_param_group(call: Call, owner: Value) -> Value:
    if isinstance(owner, Optimizer) and isinstance(owner.params, Params):
        owner.params.whole = False
    return Const(None)


BY_NAME: dict[str, Callable[[Call, Value], Value]] = {
    "backward": _backward,
    "manual_backward": lambda call, owner: _backward(call, Unknown("manual")),
    "step": _step,
    "zero_grad": _zero_grad,
    "unscale_": _unscale,
    "scale": _scale,
    "update": _update,
    "get_scale": _get_scale,
    "replay": _replay,
    "parameters": _parameters,
    "named_parameters": _parameters,
    "item": _item,
    "tolist": _item,
    "no_sync": _no_sync,
    "no_backward_sync": _no_backward_sync,
    "accumulate": _accumulate,
    "prepare": _prepare,
    "sum": _reduced(Kind.SUM),
    "mean": _reduced(Kind.MEAN),
    "div": _divide,
    "div_": _divide,
    "mul": _multiply,
    "mul_": _multiply,
    "append": _append,
    "extend": _extend,
    "detach": _detached,
    "nan_to_num_": _replace,
    "masked_fill_": _replace,
    "norm": _norm,
    "zero_": _zero,
    "copy_": _fill,
    "add_": _fill,
    "size": _size,
    "add_param_group": _add_param_group,
    "clip_gradients": lambda call, owner: clip(call, by=owner),
    "__len__": _size,
    "t": _transposed,
}
