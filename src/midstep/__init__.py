"""Everything between `backward()` and `optimizer.step()`.

Many small batches add up to exactly one large one, the gradient that is clipped is the true one,
and a step is taken only when it is sound.

    gradient = sum over ranks and microbatches of grad(loss_sum) / denominator

This module holds the public names and nothing else. Each is loaded when it is first used, so
`import midstep` costs no import of torch, and neither does a command that only reads text.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the same names once more, for type checkers and for the reference pages
    from midstep import observers, schedules
    from midstep.auditing.context import audit
    from midstep.autorows import AutoRows
    from midstep.checkpoint import load, save
    from midstep.clip import (
        Adaptive,
        ByGlobalNorm,
        ByGroupNorm,
        ByQuantile,
        ByRms,
        ByTensorAverage,
        ByTensorNorm,
        ByValue,
        ByZScore,
        Chain,
        SkipSpike,
        clip_grad_norm_,
        clip_grad_value_,
        total_norm,
    )
    from midstep.comparing import compare
    from midstep.counts import elements, rows, targets
    from midstep.errors import (
        CheckpointError,
        CountMismatch,
        EmptyWindow,
        MidstepError,
        NonFiniteGradient,
        RankFailure,
        WindowError,
    )
    from midstep.losses import LossSum, cross_entropy
    from midstep.nonfinite import Raise, Skip
    from midstep.planning import plan
    from midstep.precision import BF16, FP16, FP32
    from midstep.range_test import lr_range
    from midstep.ranks.sharded import Sharding
    from midstep.recipes.recipe import Recipe
    from midstep.recomputing import recompute
    from midstep.records import UpdateRecord, Verdict
    from midstep.sinks import JsonLines
    from midstep.updater import Updater
    from midstep.verifying import Certificate, verify
    from midstep.window import Window

__version__ = "0.1.0"

# Where each public name lives. A module named here is itself public: `midstep.schedules.cosine`.
_PUBLIC = {
    "Updater": "updater",
    "Window": "window",
    "LossSum": "losses",
    "cross_entropy": "losses",
    "targets": "counts",
    "rows": "counts",
    "elements": "counts",
    "ByGlobalNorm": "clip",
    "ByGroupNorm": "clip",
    "ByTensorNorm": "clip",
    "ByValue": "clip",
    "ByRms": "clip",
    "Adaptive": "clip",
    "ByQuantile": "clip",
    "ByZScore": "clip",
    "ByTensorAverage": "clip",
    "SkipSpike": "clip",
    "Chain": "clip",
    "clip_grad_norm_": "clip",
    "clip_grad_value_": "clip",
    "total_norm": "clip",
    "Raise": "nonfinite",
    "Skip": "nonfinite",
    "FP32": "precision",
    "BF16": "precision",
    "FP16": "precision",
    "Sharding": "ranks.sharded",
    "UpdateRecord": "records",
    "Verdict": "records",
    "JsonLines": "sinks",
    "save": "checkpoint",
    "load": "checkpoint",
    "lr_range": "range_test",
    "compare": "comparing",
    "Recipe": "recipes.recipe",
    "verify": "verifying",
    "Certificate": "verifying",
    "audit": "auditing.context",
    "plan": "planning",
    "AutoRows": "autorows",
    "recompute": "recomputing",
    "MidstepError": "errors",
    "EmptyWindow": "errors",
    "NonFiniteGradient": "errors",
    "CountMismatch": "errors",
    "WindowError": "errors",
    "CheckpointError": "errors",
    "RankFailure": "errors",
    "observers": "observers",
    "schedules": "schedules",
}

__all__ = [
    "Updater",
    "Window",
    "LossSum",
    "cross_entropy",
    "targets",
    "rows",
    "elements",
    "ByGlobalNorm",
    "ByGroupNorm",
    "ByTensorNorm",
    "ByValue",
    "ByRms",
    "Adaptive",
    "ByQuantile",
    "ByZScore",
    "ByTensorAverage",
    "SkipSpike",
    "Chain",
    "clip_grad_norm_",
    "clip_grad_value_",
    "total_norm",
    "Raise",
    "Skip",
    "FP32",
    "BF16",
    "FP16",
    "Sharding",
    "UpdateRecord",
    "Verdict",
    "JsonLines",
    "save",
    "load",
    "lr_range",
    "compare",
    "Recipe",
    "verify",
    "Certificate",
    "audit",
    "plan",
    "AutoRows",
    "recompute",
    "MidstepError",
    "EmptyWindow",
    "NonFiniteGradient",
    "CountMismatch",
    "WindowError",
    "CheckpointError",
    "RankFailure",
    "observers",
    "schedules",
]


def __getattr__(name: str) -> object:
    """Load a public name where it lives (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    # Not kept: a look-up costs 1 microsecond, and this module stays without state.
    module = import_module(f"{__name__}.{_PUBLIC[name]}")
    return module if name == _PUBLIC[name] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
