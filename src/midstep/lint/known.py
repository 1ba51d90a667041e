"""What is known of functions outside the file, by their names: nothing of them is imported."""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

from .values import Kind

__all__ = [
    "CLIPS",
    "LOSS_FUNCTIONS",
    "NORMS",
    "OPAQUE_WORDS",
    "PASSED_ON",
    "clips_by_hand",
    "cuts_rows",
    "is_accumulation_name",
    "is_bar",
    "is_model_name",
    "is_optimizer_class",
    "is_optimizer_key",
    "is_schedule_class",
    "is_schedule_key",
    "is_scaler_key",
    "is_trainer_key",
    "loss_class",
]

# Methods that give the same thing back.
PASSED_ON = {
    *("to", "cuda", "cpu", "train", "eval", "float", "double", "half", "bfloat16", "type"),
    *("contiguous", "requires_grad_", "compile", "clone", "float32", "mean_", "squeeze", "view"),
    *("reshape", "clamp", "clamp_", "clamp_min", "clip", "nan_to_num", "unsqueeze", "flatten"),
    *("share_memory", "apply", "to_empty", "channels_last", "type_as", "expand_as"),
}
LOSS_FUNCTIONS = {
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "ctc_loss"),
    *("gaussian_nll_loss", "poisson_nll_loss", "soft_margin_loss", "hinge_embedding_loss"),
    *("cosine_embedding_loss", "margin_ranking_loss", "triplet_margin_loss", "multi_margin_loss"),
    *("multilabel_soft_margin_loss", "multilabel_margin_loss"),
}
# `p.grad.mul_(clip_coef)`, `p.grad *= max_norm / total_norm`.
BY_NORM = re.compile(r"norm|clip|coef", re.IGNORECASE)
CLIPS = {"clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grads_with_norm_"}
NORMS = {"get_total_norm", "total_norm", "_get_total_norm"}
OPTIMIZERS = {
    *(
        "SGD",
        "Adam",
        "AdamW",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
    ),
    *("ASGD", "LBFGS", "SparseAdam", "Adafactor", "Lion", "LAMB", "Lamb", "LARS", "FusedAdam"),
    *(
        "FusedLAMB",
        "AdamW8bit",
        "Adam8bit",
        "Muon",
        "RangerLars",
        "Ranger",
        "AdaBelief",
        "NovoGrad",
    ),
    *("DeepSpeedCPUAdam", "PagedAdamW", "AdaBound", "Prodigy", "ScheduleFreeAdamW"),
}
SCHEDULES = re.compile(
    r"torch\.optim\.lr_scheduler\.\w+$|(^|\.)get_(\w+_)?(scheduler|schedule)(_with_\w+)?$"
)
OPTIMIZER_KEY = re.compile(
    r"(^|_)(opt|optim|optimizer|optimiser|optimizers|opts)(_?\w{0,12})?$|optimizer$|optim$|_opt$"
    r"|^opt[A-Z]\w*$|optimizer[_A-Z]?\w*$"
)
SCHEDULE_KEY = re.compile(r"sched|(^|_)lr_?s$|warmup_lr$")
SCALER_KEY = re.compile(r"scaler")
TRAINER_KEY = re.compile(r"accelerator|fabric|engine|strategy|trainer|deepspeed|manual")
BAR = re.compile(r"tqdm|progress|trange|track|prefetch|logger|log_every|bar$|islice|cycle")
# `accumulation_steps`, `grad_accum`, `accum_iter`, `acc_grad`, `iter_size`, `update_freq`, ...
ACCUMULATION = re.compile(
    r"accum|(^|_)acc_(grad|step)|grad_acc|iter_size|backward_passes|update_freq|virtual_batch"
    r"|(num|n)_?micro_?(batches|steps)|micro_steps|gas$",
    re.IGNORECASE,
)

# A method that is not in sight may do what its name says.
OPAQUE_WORDS = re.compile(
    r"step|zero|optim|backward|backprop|update|clip|scale|train|reset|learn|fit|accum"
)


class LossClass(NamedTuple):
    kind: Kind
    name: str


def loss_class(name: str) -> str:
    """The name of a loss of `torch.nn`, or nothing.

    Args:
        name: Dotted.
    """
    last = name.rpartition(".")[2]
    return last if name.startswith("torch.nn.") and last.endswith("Loss") else ""


def is_optimizer_class(name: str) -> bool:
    """Whether a call of this makes an optimizer.

    Args:
        name: Dotted.
    """
    last = name.rpartition(".")[2]
    if name.startswith("torch.optim.") and "lr_scheduler" not in name and "swa" not in name:
        return last[:1].isupper()
    return last in OPTIMIZERS


def is_schedule_class(name: str) -> bool:
    """Whether a call of this makes a schedule that ticks.

    Args:
        name: Dotted.
    """
    return bool(SCHEDULES.search(name))


def _last(key: str) -> str:
    return key.rpartition(".")[2].partition("[")[0]


def is_optimizer_key(key: str) -> bool:
    """Whether words name an optimizer.

    Args:
        key: Dotted.

    Example:
        >>> [is_optimizer_key(key) for key in ("self.opt_d", "optimizer_G", "option", "env")]
        [True, True, False, False]
    """
    last = _last(key)
    return bool(OPTIMIZER_KEY.search(last)) and not last.startswith(("option", "optimal"))


def is_schedule_key(key: str) -> bool:
    """Whether words name a schedule.

    Args:
        key: Dotted.
    """
    return bool(SCHEDULE_KEY.search(_last(key).lower())) and "noise" not in key.lower()


def is_scaler_key(key: str) -> bool:
    """Whether words name a gradient scaler.

    Args:
        key: Dotted.
    """
    return bool(SCALER_KEY.search(_last(key).lower()))


def is_trainer_key(key: str) -> bool:
    """Whether words name an object that runs the backward for its caller.

    Args:
        key: Dotted.
    """
    return bool(TRAINER_KEY.search(_last(key).lower()))


def is_bar(name: str) -> bool:
    """Whether a call of this passes its first argument on: `tqdm(loader)`.

    Args:
        name: Dotted.
    """
    return bool(BAR.search(_last(name).lower()))


def is_accumulation_name(key: str) -> bool:
    """Whether words name the number of microbatches in a window.

    Args:
        key: As `key_of` gives it.

    Example:
        >>> is_accumulation_name("args.gradient_accumulation_steps"), is_accumulation_name("epochs")
        (True, False)
    """
    return bool(ACCUMULATION.search(key.rpartition(".")[2]))


def clips_by_hand(factor: str) -> bool:
    """Whether gradients are multiplied by what a norm says, and not by a constant of the loop.

    Args:
        factor: The words of what they are multiplied by.

    Example:
        >>> clips_by_hand("max_norm / (total_norm + 1e-6)"), clips_by_hand("1 / accum")
        (True, False)
    """
    return bool(BY_NORM.search(factor))


def cuts_rows(over: ast.expr) -> bool:
    """Whether what is looped over are pieces of a batch: `zip(x.split(4), y.split(4))`.

    Args:
        over: What a `for` statement goes over.

    Example:
        >>> texts = "x.chunk(4)", "zip(x.split(4), y.split(4))", "x.split(4, dim=1)"
        >>> [cuts_rows(ast.parse(text, mode="eval").body) for text in texts]
        [True, True, False]
    """
    cuts = [
        node
        for node in ast.walk(over)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"split", "chunk", "tensor_split"}
    ]
    return bool(cuts) and all(_is_along_rows(cut) for cut in cuts)


def _is_along_rows(cut: ast.Call) -> bool:
    is_function = isinstance(cut.func, ast.Attribute) and (
        isinstance(cut.func.value, ast.Name) and cut.func.value.id == "torch"
    )
    sizes = cut.args[1:] if is_function else cut.args
    dims = sizes[1:] + [keyword.value for keyword in cut.keywords if keyword.arg == "dim"]
    return bool(sizes) and all(isinstance(dim, ast.Constant) and dim.value == 0 for dim in dims)


def is_model_name(name: str) -> bool:
    """Whether a name is that of a model, so that a call of it is a forward.

    Args:
        name: Not dotted.
    """
    last = name.lower()
    return last in {"model", "net", "network", "module"} or last.endswith(("_model", "model_"))
