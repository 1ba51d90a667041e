"""`midstep plan`: what fits, what it costs to make it fit, and whether that is so."""

from __future__ import annotations

from ..arithmetic import Dtype, OptimizerKind, Sharded
from . import declarations as given
from . import plan_declarations as asked
from .failures import attempt
from .planning import Change, Device, Kept, Trained, Update, run_plan

__all__ = ["plan"]


def plan(  # noqa: PLR0917 - an option of the command is an argument here
    recipe: asked.RecipeName = None,
    params: asked.Params = None,
    trainable: asked.Trainable = None,
    lora: asked.Lora = None,
    adapt: asked.Adapt = None,
    optimizer: asked.Optimizer = OptimizerKind.ADAMW,
    dtype: asked.WeightDtype = Dtype.FP32,
    frozen_dtype: asked.FrozenDtype = None,
    grad_dtype: asked.GradDtype = None,
    state_dtype: asked.StateDtype = None,
    master: asked.Master = False,
    rows: asked.Rows = None,
    targets: asked.Targets = None,
    check: asked.Check = False,
    time: asked.Timed = False,
    recompute: asked.RecomputeToo = False,
    picture: asked.Picture = None,
    all_ways: asked.EveryWay = False,
    budget: asked.Budget = None,
    headroom: asked.Headroom = 0.1,
    ranks: asked.Ranks = 1,
    sharded: asked.Cut = Sharded.NOTHING,
    defer: asked.Defer = False,
    new_batch: asked.NewBatch = None,
    batch: asked.Batch = None,
    lr: asked.LearningRate = None,
    decay: asked.Decay = None,
    updates: asked.Updates = None,
    form: asked.Form = asked.Format.TABLE,
    traceback: given.Traceback = False,
) -> int:
    """Say what fits before it is tried: memory of a training state, and ways to an update.

    Exit code 1 when the budget does not hold it.
    """
    trained = Trained(params, trainable, lora, adapt)
    kept = Kept(optimizer, dtype, frozen_dtype, grad_dtype, state_dtype, master)
    update = Update(recipe, rows, targets, check, time, recompute, picture, all_ways)
    device = Device(budget, headroom, ranks, sharded, defer)
    change = Change(new_batch, batch, lr, decay, updates)
    return attempt(
        lambda: run_plan(trained, kept, update, device, change, form=form), traceback=traceback
    )
