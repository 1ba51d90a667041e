"""Calls of functions that are outside the file: what they make, and what happens in them."""

from __future__ import annotations

from collections.abc import Callable

from . import known
from .builtin import BUILTINS
from .call import Call, use_up
from .evaluator import Evaluator, text_of
from .gradients import in_full
from .trace import Act
from .values import (
    Accelerator,
    Const,
    Context,
    Criterion,
    Instance,
    Items,
    Kind,
    Loss,
    Module,
    Optimizer,
    Params,
    Scaler,
    Schedule,
    Unknown,
    Value,
    Wrap,
    key_of,
)

__all__ = ["call_outside", "clip", "loss_of", "opaque", "optimizer_of", "params_of"]


def call_outside(call: Call, name: str) -> Value:
    """Say what a call of an imported function stands for.

    Args:
        call: The call.
        name: The function, dotted.
    """
    last = name.rpartition(".")[2]
    if (handler := BY_NAME.get(last)) is not None:
        return handler(call)
    if known.is_optimizer_class(name):
        return optimizer_of(call, last)
    if known.is_schedule_class(name):
        return _schedule(call, last)
    if last in known.LOSS_FUNCTIONS:
        return loss_of(call, last, None)
    if loss := known.loss_class(name):
        return _criterion(call, loss)
    if last in known.CLIPS:
        return clip(call)
    if last in known.NORMS:
        call.reader.emit(Act.NORM, call.node, call.get(0, "tensors"))
        return Unknown(text_of(call.node.func))
    if name.startswith("torch.nn.") and last[:1].isupper():
        return Module(f"{text_of(call.node.func)}(", parts=_parts(call.args), node=call.node)
    if known.is_bar(name) and call.args:
        return call.args[0]
    opaque(call)
    return Unknown(f"{name}()", is_result=True, class_name=last if last[:1].isupper() else "")


def _parts(values: list[Value]) -> tuple[Value, ...]:
    """The modules among what a module is made of, those in lists included."""
    found: list[Value] = []
    for value in values:
        if isinstance(value, Items):
            found += _parts(value.items)
        elif isinstance(value, Module | Instance | Unknown):
            found.append(value)
    return tuple(found)


def opaque(call: Call) -> None:
    """A function that is not in sight and is given an optimizer, a scaler or a schedule.

    Args:
        call: The call.
    """
    for value in (*call.args, *call.named.values()):
        if isinstance(value, Optimizer | Scaler) or known.is_optimizer_key(key_of(value)):
            call.reader.emit(Act.UNKNOWN, call.node, value)


def params_of(reader: Evaluator, value: Value | None) -> Value:
    """What `parameters()` of something is, or the tensors that were given themselves.

    Args:
        reader: Knows the modules.
        value: What an optimizer or a clip is given.
    """
    if isinstance(value, Params):
        return value
    if isinstance(value, Items):
        found = [params_of(reader, item) for item in value.items]
        if found and all(isinstance(item, Params) for item in found):
            several = [item for item in found if isinstance(item, Params)]
            modules = tuple(module for item in several for module in item.modules)
            return Params(modules, one_shot=False, whole=all(item.whole for item in several))
    return value if value is not None else Unknown("?")


def optimizer_of(call: Call, class_name: str) -> Value:
    """The making of an optimizer.

    Args:
        call: The call of its class.
        class_name: Without its package.
    """
    given = call.get(0, "params")
    params = params_of(call.reader, given)
    made = Optimizer(f"{text_of(call.node.func)}(", params, class_name, call.node)
    use_up(given)
    call.reader.emit(Act.MAKE, call.node, made)
    return made


def _schedule(call: Call, class_name: str) -> Value:
    optimizer = call.get(0, "optimizer")
    if not isinstance(optimizer, Optimizer):
        optimizer = next(
            (v for v in (*call.args, *call.named.values()) if isinstance(v, Optimizer)), optimizer
        )
    words = {"T_max", "total_steps", "total_iters", "num_training_steps", "epochs", "step_size"}
    horizon = [keyword for keyword in call.node.keywords if keyword.arg in words]
    nodes = [keyword.value for keyword in horizon]
    values = [call.named[str(keyword.arg)] for keyword in horizon]
    if class_name == "CosineAnnealingLR" and len(call.args) > 1:
        nodes.append(call.node.args[1])
        values.append(call.args[1])
    if class_name.endswith("_with_warmup") and len(call.args) > 2:
        nodes.append(call.node.args[2])
        values.append(call.args[2])
    if any(keyword.arg == "steps_per_epoch" for keyword in call.node.keywords):
        nodes = [k.value for k in call.node.keywords if k.arg in {"epochs", "steps_per_epoch"}]
        values = [call.named["steps_per_epoch"]]
    resumes = "last_epoch" in call.named
    return Schedule(
        f"{text_of(call.node.func)}(",
        class_name,
        optimizer,
        tuple(nodes),
        tuple(values),
        call.node,
        resumes,
    )


def _unequal(call: Call) -> str:
    """Why the mean of a loss is over a number that changes, or nothing."""
    if isinstance(weight := call.named.get("weight"), Value) and not _is_none(weight):
        return "class weights choose what it is a mean of"
    ignored = call.named.get("ignore_index")
    if ignored is not None and not _is_none(ignored):
        return "`ignore_index` leaves out targets"
    return ""


def _is_none(value: Value) -> bool:
    return isinstance(value, Const) and value.value is None


def _kind(call: Call, other: Kind = Kind.MEAN) -> Kind:
    if "reduction" not in call.named:
        return other
    reductions = {"mean": Kind.MEAN, "sum": Kind.SUM, "none": Kind.ELEMENTS}
    return reductions.get(str(call.flag("reduction")), Kind.OTHER)


def _criterion(call: Call, class_name: str) -> Value:
    unequal = _unequal(call) if class_name in {"CrossEntropyLoss", "NLLLoss"} else ""
    kind = Kind.SUM if call.flag("size_average") is False else _kind(call)
    return Criterion(kind, unequal, class_name)


def loss_of(call: Call, name: str, criterion: Criterion | None) -> Value:
    """Say what a call of a loss stands for.

    Args:
        call: The call.
        name: The function or the class.
        criterion: What is known from its making; None for a function.
    """
    kind = _kind(call) if criterion is None else criterion.kind
    unequal = criterion.unequal if criterion is not None else ""
    if criterion is None and name in {"cross_entropy", "nll_loss"}:
        unequal = _unequal(call)
    if unequal.startswith("class") and kind is not Kind.MEAN:
        unequal = ""
    across = False
    if name in {"cross_entropy", "CrossEntropyLoss"}:
        across = key_of(call.get(1, "target")).startswith("torch.arange(")
    return Loss(
        kind,
        call.node,
        unequal=unequal if kind is Kind.MEAN else "",
        across_rows=across,
        roots=tuple(call.args),
    )


def clip(call: Call, *, by: Value | None = None) -> Value:
    """A call of a clip: of what, to what.

    Args:
        call: The call.
        by: The object whose method it is.
    """
    given = call.get(0, "parameters")
    limit = call.get(1, "max_norm") or call.get(1, "clip_value")
    is_endless = isinstance(limit, Const) and isinstance(limit.value, float | int)
    is_endless = is_endless and limit is not None and getattr(limit, "value", 0) == float("inf")
    is_endless = is_endless or key_of(limit) in {"math.inf", "torch.inf", "numpy.inf"}
    subject = params_of(call.reader, given)
    is_spent = isinstance(given, Params) and (
        given.used_up or (given.one_shot and given.born_in < call.reader.num_loops())
    )
    call.reader.emit(Act.CLIP, call.node, subject, by=by or limit, calm=is_endless, spent=is_spent)
    use_up(given)
    return Unknown("norm")


def _scaler(call: Call) -> Value:
    return Scaler(f"{text_of(call.node.func)}(", enabled=call.flag("enabled", True) is not False)


def _wrapped(call: Call, wrap: Wrap) -> Value:
    model = call.get(0, "module")
    return Module(f"{key_of(model)}", inner=model, wrap=wrap, node=call.node)


def _chain(call: Call) -> Value:
    parts = [params_of(call.reader, value) for value in call.args]
    if parts and all(isinstance(part, Params) for part in parts):
        several = [part for part in parts if isinstance(part, Params)]
        modules = tuple(module for part in several for module in part.modules)
        whole = all(part.whole for part in several)
        born = call.reader.num_loops()
        return Params(modules, one_shot=True, whole=whole, node=call.node, born_in=born)
    return Unknown("chain()")


def _all_reduce(call: Call) -> Value:
    value = call.get(0, "tensor")
    node = call.node.args[0] if call.node.args else call.node
    if isinstance(value, Loss):
        value.reduced = True
    if ".grad" in text_of(node) or "grad" in key_of(value):
        call.reader.emit(Act.REDUCE, call.node, value)
    else:
        call.reader.emit(Act.GATHER, call.node, value)
    return value if value is not None else Unknown("?")


def _gather(call: Call) -> Value:
    call.reader.emit(Act.GATHER, call.node, call.args[0] if call.args else None)
    return Unknown("gathered()")


def _hidden(call: Call) -> Value:
    value = call.args[0] if call.args else None
    call.reader.emit(Act.REPORT, call.node, value)
    return Unknown("number")


def _same(call: Call) -> Value:
    return call.args[0] if call.args else Unknown("?")


def _stack(call: Call) -> Value:
    return Unknown("stack()")


def _nan_to_num(call: Call) -> Value:
    node = call.node.args[0] if call.node.args else call.node
    if ".grad" in text_of(node):
        call.reader.emit(Act.REPLACE, call.node, call.get(0, "input"))
    elif isinstance(call.get(0, "input"), Loss):
        call.reader.emit(Act.REPORT, call.node, call.get(0, "input"))
    return call.get(0, "input") or Unknown("?")


def _norm(call: Call) -> Value:
    """`torch.norm(p.grad)`, `torch.linalg.vector_norm(p.grad)`."""
    if call.node.args and ".grad" in f"{in_full(call.reader, call.node.args[0])}.":
        call.reader.emit(Act.NORM, call.node, call.args[0])
    return Unknown("norm")


def _arange(call: Call) -> Value:
    return Unknown("torch.arange()")


BY_NAME: dict[str, Callable[[Call], Value]] = {
    **BUILTINS,
    "GradScaler": _scaler,
    "ShardedGradScaler": _scaler,
    "DistributedDataParallel": lambda call: _wrapped(call, Wrap.REPLICATED),
    "DDP": lambda call: _wrapped(call, Wrap.REPLICATED),
    "FullyShardedDataParallel": lambda call: _wrapped(call, Wrap.SHARDED),
    "FSDP": lambda call: _wrapped(call, Wrap.SHARDED),
    "DataParallel": _same,
    "compile": _same,
    "deepcopy": _stack,
    "convert_sync_batchnorm": _same,
    "Accelerator": lambda call: Accelerator(
        f"{text_of(call.node.func)}(", call.named.get("gradient_accumulation_steps")
    ),
    "nullcontext": lambda call: Context("null"),
    "chain": _chain,
    "all_gather": _gather,
    "all_gather_object": _gather,
    "broadcast": _gather,
    "reduce_scalar": _gather,
    "gather": _gather,
    "nanmean": _hidden,
    "nansum": _hidden,
    "nanmedian": _hidden,
    "all_reduce": _all_reduce,
    "nan_to_num": _nan_to_num,
    "nan_to_num_": _nan_to_num,
    "norm": _norm,
    "vector_norm": _norm,
    "arange": _arange,
    "ceil": _stack,
}


def is_builtin(name: str) -> bool:
    """Whether a name that nobody defined is Python's own and known here.

    Args:
        name: Not dotted.
    """
    return name in BY_NAME or name in {"map", "min", "max", "next", "print", "isinstance"}
