"""The options of commands that train, as they are declared: name, unit, default and help.

Each is declared once, here, so that it means the same in every command that has it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from .options import ParallelName, PrecisionName, ScheduleName

__all__ = [
    "Clip",
    "EvaluateEvery",
    "LearningRate",
    "Minimum",
    "NamedRecipe",
    "Observe",
    "Out",
    "Parallel",
    "Precision",
    "RecipeName",
    "Resume",
    "Rows",
    "SaveEvery",
    "ScheduleShape",
    "Seed",
    "Size",
    "SkipNonfinite",
    "Steps",
    "Targets",
    "Traceback",
    "Warmup",
]

_WINDOW = "The window: at most one of these"
_UPDATE = "The update"
_RATE = "The rate"
_RUN = "The run"


def norm_or_none(text: str) -> float:
    """Read a norm; `none` is infinity, which clips nothing.

    Args:
        text: As it was typed.

    Raises:
        BadParameter: It is neither a number nor `none`.
    """
    if text == "none":
        return math.inf
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"`{text}` is neither a number nor `none`.") from None


RecipeName: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE",
        help="A built-in recipe (language, digits or pairs), or a .py file that defines "
        "recipe(seed) and returns a midstep.Recipe. Not needed with --resume.",
        show_default=False,
    ),
]
NamedRecipe: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A built-in recipe (language, digits, pairs), or a .py file that defines recipe(seed) "
        "and returns a midstep.Recipe.",
        show_default=False,
    ),
]
Size: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Batches of the loader in a window, that is in one update. Default: the recipe's.",
        rich_help_panel=_WINDOW,
    ),
]
Rows: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Make each batch of the loader a window, cut into microbatches of at most N rows. "
        "Default: the recipe's.",
        rich_help_panel=_WINDOW,
    ),
]
Targets: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="As many batches of the loader in a window as hold at least N targets. Default: the "
        "recipe's.",
        rich_help_panel=_WINDOW,
    ),
]
Precision: TypeAlias = Annotated[
    PrecisionName | None,
    typer.Option(
        help="What the forward computes in. The weights stay in their own dtype; fp16 also scales "
        "the loss. Default: the recipe's.",
        rich_help_panel=_UPDATE,
    ),
]
Clip: TypeAlias = Annotated[
    float | None,
    typer.Option(
        metavar="NORM|none",
        parser=norm_or_none,
        help="Largest norm of the gradient of the mean loss; a longer gradient is shortened to it. "
        "none only measures. Default: the recipe's.",
        rich_help_panel=_UPDATE,
    ),
]
SkipNonfinite: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Skip updates whose gradient holds inf or nan, up to N in a row. Default: stop at the "
        "first.",
        rich_help_panel=_UPDATE,
    ),
]
LearningRate: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--lr",
        metavar="RATE",
        help="Base rate, which the schedule multiplies. Default: the recipe's.",
        rich_help_panel=_RATE,
    ),
]
ScheduleShape: TypeAlias = Annotated[
    ScheduleName | None,
    typer.Option(
        help="How the rate goes on after the warm-up; wsd stays up and falls in the last fifth of "
        "the run. Default: the recipe's, with its own warm-up.",
        rich_help_panel=_RATE,
    ),
]
Warmup: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Updates in which the rate rises to its base; only with --schedule. Default: 0.",
        rich_help_panel=_RATE,
    ),
]
Minimum: TypeAlias = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Where the schedule ends, as a share of the base rate from 0 to 1; only with "
        "--schedule. Default: 0.",
        rich_help_panel=_RATE,
    ),
]
Steps: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Applied updates of the whole run; skipped ones do not count. Default: the recipe's.",
        rich_help_panel=_RUN,
    ),
]
Seed: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Decides the first weights, the order of the data and dropout. Default: 0.",
        rich_help_panel=_RUN,
    ),
]
Out: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Where to write the run; refused where there is one. Default: runs/RECIPE-1, or the "
        "next free number.",
        rich_help_panel=_RUN,
    ),
]
Resume: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Go on with the run in FOLDER after its last checkpoint. Options that would make it "
        "another run are refused.",
        rich_help_panel=_RUN,
    ),
]
Parallel: TypeAlias = Annotated[
    ParallelName | None,
    typer.Option(
        help="How the processes that torchrun started share the model: ddp, whole on each, or "
        "fsdp, in shards. Default: one process alone.",
        rich_help_panel=_RUN,
    ),
]
SaveEvery: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Applied updates from one checkpoint to the next; the end is saved in any case. "
        "Default: a tenth of the run.",
        rich_help_panel=_RUN,
    ),
]
EvaluateEvery: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Applied updates from one held-out loss to the next; the end is measured in any case. "
        "Default: a tenth of the run.",
        rich_help_panel=_RUN,
    ),
]
Observe: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--observe/--no-observe",
        help="Record everything that can be observed, at every update: entries, moments, each "
        "microbatch, noise scale and more. Default: time by stage, and every tenth update norms by "
        "tensor, the real update and memory.",
        rich_help_panel=_RUN,
    ),
]
Traceback: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--traceback",
        help="When something fails, show the whole traceback, too.",
        rich_help_panel=_RUN,
    ),
]
