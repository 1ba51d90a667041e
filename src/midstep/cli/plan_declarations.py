"""The options of `midstep plan`, as they are declared: name, unit, default and help."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from ..arithmetic import Dtype, OptimizerKind, Sharded

__all__ = [
    "Batch",
    "Decay",
    "LearningRate",
    "NewBatch",
    "Updates",
    "Adapt",
    "EveryWay",
    "Budget",
    "Check",
    "Cut",
    "Defer",
    "Form",
    "Format",
    "FrozenDtype",
    "GradDtype",
    "Headroom",
    "Lora",
    "Master",
    "Optimizer",
    "Params",
    "Picture",
    "Ranks",
    "RecipeName",
    "RecomputeToo",
    "Rows",
    "StateDtype",
    "Targets",
    "Timed",
    "Trainable",
    "WeightDtype",
]

_STATE = "The state, by arithmetic: with --params"
_UPDATE = "The update, traced: with a recipe"
_DEVICE = "The device"
_CHANGE = "Another batch: rate and decay to begin a sweep with"


class Format(enum.StrEnum):
    """How the result is printed."""

    TABLE = "table"
    JSON = "json"


RecipeName: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE",
        help="A built-in recipe or a .py file. Not with --params.",
        show_default=False,
    ),
]
Params: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Parameters in all, such as 400M or 7B: adds up what a training state takes.",
        rich_help_panel=_STATE,
    ),
]
Trainable: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Of these, parameters that are trained; the rest is frozen. Default: all.",
        rich_help_panel=_STATE,
    ),
]
Lora: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="RANK",
        help="Train low-rank adapters of --adapt instead; all of --params is frozen.",
        rich_help_panel=_STATE,
    ),
]
Adapt: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="NxROWSxCOLUMNS",
        help="Matrices that get an adapter, such as 128x4096x4096; several by commas.",
        rich_help_panel=_STATE,
    ),
]
Optimizer: TypeAlias = Annotated[
    OptimizerKind,
    typer.Option(help="Whose state is kept. Default: adamw.", rich_help_panel=_STATE),
]
WeightDtype: TypeAlias = Annotated[
    Dtype, typer.Option(help="Of the weights. Default: fp32.", rich_help_panel=_STATE)
]
FrozenDtype: TypeAlias = Annotated[
    Dtype | None,
    typer.Option(help="Of frozen weights. Default: that of the others.", rich_help_panel=_STATE),
]
GradDtype: TypeAlias = Annotated[
    Dtype | None,
    typer.Option(
        help="Of what accumulates in .grad. Default: that of the weights.",
        rich_help_panel=_STATE,
    ),
]
StateDtype: TypeAlias = Annotated[
    Dtype | None,
    typer.Option(
        help="Of the optimizer's state. Default: that of what it steps.",
        rich_help_panel=_STATE,
    ),
]
Master: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--master",
        help="Keep a float32 copy of narrower weights, which the optimizer steps. Default: no.",
        rich_help_panel=_STATE,
    ),
]
Rows: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Rows of an update, of all ranks. Default: what the recipe's update has.",
        rich_help_panel=_UPDATE,
    ),
]
Targets: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Targets of an update instead, at as many a row as the first batch holds. "
        "Default: none.",
        rich_help_panel=_UPDATE,
    ),
]
Check: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Run the best way and print predicted against measured. Default: no.",
        rich_help_panel=_UPDATE,
    ),
]
Timed: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--time",
        help="Run the recipe's model at two sizes for each precision and recompute, and rank by "
        "what they took. Default: no, by operations.",
        rich_help_panel=_UPDATE,
    ),
]
RecomputeToo: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--recompute",
        help="Measure peak, time and gradients for each number of blocks that are run again "
        "together. Default: no.",
        rich_help_panel=_UPDATE,
    ),
]
Picture: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="With --recompute: draw it, as .png, .svg or .html. Default: no picture.",
        rich_help_panel=_UPDATE,
    ),
]
EveryWay: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--all", help="Every way, not the best eight. Default: no.", rich_help_panel=_UPDATE
    ),
]
Budget: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES",
        help="Memory of the device of one rank, such as 24GB (decimal) or 24GiB (binary). "
        "Default: no limit.",
        rich_help_panel=_DEVICE,
    ),
]
Headroom: TypeAlias = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        help="Set aside for workspaces and fragmentation, as a share of the budget. Default: 0.1.",
        rich_help_panel=_DEVICE,
    ),
]
Ranks: TypeAlias = Annotated[
    int,
    typer.Option(
        metavar="N", help="Ranks that share the work. Default: 1.", rich_help_panel=_DEVICE
    ),
]
Cut: TypeAlias = Annotated[
    Sharded,
    typer.Option(
        help="What is cut over the ranks; zero3 is FSDP. Default: none.",
        rich_help_panel=_DEVICE,
    ),
]
Defer: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--defer",
        help="With --params: add up gradients once a window, whole on each rank. Default: no.",
        rich_help_panel=_DEVICE,
    ),
]
Form: TypeAlias = Annotated[Format, typer.Option("--format", help="Table or JSON. Default: table.")]
NewBatch: TypeAlias = Annotated[
    float | None,
    typer.Option(
        metavar="TARGETS",
        help="Targets of an update from now on. Needs the four options below. Default: no change.",
        rich_help_panel=_CHANGE,
    ),
]
Batch: TypeAlias = Annotated[
    float | None,
    typer.Option(
        metavar="TARGETS",
        help="Targets of an update so far, as the records count them.",
        rich_help_panel=_CHANGE,
    ),
]
LearningRate: TypeAlias = Annotated[
    float | None,
    typer.Option(metavar="RATE", help="The mean rate of the run so far.", rich_help_panel=_CHANGE),
]
Decay: TypeAlias = Annotated[
    float | None,
    typer.Option(metavar="DECAY", help="Its weight decay.", rich_help_panel=_CHANGE),
]
Updates: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", help="Applied updates of the whole run.", rich_help_panel=_CHANGE),
]
