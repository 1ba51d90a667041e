"""The options of `midstep report`, as they are declared: name, unit, default and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from .declarations import Traceback

__all__ = [
    "AsJson",
    "ColumnNames",
    "IsDark",
    "MaxNorm",
    "PageFile",
    "PictureFolder",
    "Port",
    "Runs",
    "Traceback",
    "Watches",
    "WritesPage",
]

Runs: TypeAlias = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...",
        help="Folders of runs, or logs: CSV, JSON lines, TensorBoard event files, "
        "`trainer_state.json`. Several are laid over each other.",
        show_default=False,
    ),
]

PageFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Where the page is written. Default: `report.html` in the folder of the run; for "
        "several, in this one.",
        show_default=False,
    ),
]

WritesPage: TypeAlias = Annotated[
    bool, typer.Option("--page/--no-page", help="Write the page, or only say the verdict.")
]

PictureFolder: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Write the charts as pictures, too: all in `report.png`, and each by its name.",
        show_default=False,
    ),
]

IsDark: TypeAlias = Annotated[
    bool, typer.Option("--dark", help="Pictures in colours for dark paper.")
]

AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print the verdict as JSON: findings, figures, facts.")
]

ColumnNames: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD=NAME",
        help="Which column of a foreign log is which, where its name does not say; may be "
        "given again. Fields: update, loss_mean, held_out, grad_norm, lr, targets, seconds, "
        "clip_coefficient, clip_max_norm, loss_scale, memory_bytes, noise_scale, update_norm.",
        show_default=False,
    ),
]

MaxNorm: TypeAlias = Annotated[
    float | None,
    typer.Option(
        metavar="NORM",
        help="The clip threshold, for a log that does not hold it.",
        show_default=False,
    ),
]

Watches: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--watch", help="Serve the page on this machine, and refresh it while the run goes on."
    ),
]

Port: TypeAlias = Annotated[
    int, typer.Option(metavar="N", min=0, max=65535, help="Of `--watch`; 0 takes a free one.")
]
