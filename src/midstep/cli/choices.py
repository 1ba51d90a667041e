"""`midstep threshold` and `midstep batch`: choices read off the log of a run."""

from __future__ import annotations

import dataclasses
import json as jsons
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from . import declarations as given
from .failures import FINE, attempt

if TYPE_CHECKING:
    from ..choosing import Shadow, ThresholdAdvice
    from ..report.run import Run

__all__ = ["batch", "threshold"]

Log: TypeAlias = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A folder of a run, or a log that `midstep report` reads.",
        show_default=False,
    ),
]
At: TypeAlias = Annotated[
    list[float] | None,
    typer.Option("--at", metavar="NORM", help="A threshold to look at; may stand several times."),
]
Picture: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Draw the norms; in an .html the threshold can be moved. Or .png, .svg.",
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]


def threshold(
    run: Log,
    at: At = None,
    picture: Picture = None,
    json: Json = False,
    traceback: given.Traceback = False,
) -> int:
    """Show what any clip threshold would have clipped in a run, and what other rules would do.

    Nothing is run again: the norms before clipping are in the log.
    """

    def action() -> int:
        from ..pictures import check_picture_path

        if picture is not None:
            check_picture_path(picture)
        for value in at or ():
            if not 0 < value < math.inf:
                raise ValueError(f"`--at {value}`: a threshold must be greater than 0 and finite")

        from ..choosing import advise_threshold

        log = _read(run)
        norms = [float(norm) for norm in log.column("grad_norm")[log.applied]]
        advice = advise_threshold(norms)
        shadows = list(_shadows(log, advice))
        if json:
            typer.echo(_json(advice, shadows))
        else:
            for line in _threshold_lines(log, advice, norms, at or [], shadows):
                typer.echo(line)
        if picture is not None:
            from ..choosing.picture import picture as draw
            from ..pictures import save_picture

            title = f"Gradient norms of {log.name}, before clipping"
            start = at[0] if at else advice.quantiles[0.9] or advice.quantiles[1.0]
            save_picture(draw(norms, start, title=title), picture, title=title)
        return FINE

    return attempt(action, traceback=traceback)


def batch(run: Log, json: Json = False, traceback: given.Traceback = False) -> int:
    """Show where a larger batch still saves updates, from the noise scale in the log.

    The noise scale is recorded by `midstep train --observe`.
    """

    def action() -> int:
        from ..choosing import advise_batch

        log = _read(run)
        targets = log.column("targets")[log.applied]
        found = advise_batch(
            log.column("noise_scale").tolist(),
            log.column("noise_scale_low").tolist(),
            log.column("noise_scale_high").tolist(),
            float(targets.mean()) if len(targets) else math.nan,
        )
        if json:
            values = dataclasses.asdict(found)
            typer.echo(jsons.dumps({**values, "high": _finite(found.high)}, allow_nan=False))
            return FINE
        for line in found.lines():
            typer.echo(line)
        return FINE

    return attempt(action, traceback=traceback)


def _read(path: Path) -> Run:
    from ..report.reading import read

    return read(path)


def _shadows(log: Run, advice: ThresholdAdvice) -> Iterator[Shadow]:
    from ..choosing import shadow, usual_rules

    norms = log.column("grad_norm")[log.applied].tolist()
    losses = log.column("loss_mean")[log.applied].tolist()
    tensors = log.by_name.get("grad_norms", {})
    num_updates = len(log)
    is_whole = bool(tensors) and all(len(s) == num_updates for s in tensors.values())
    table = None
    if is_whole and bool(log.applied.all()):
        table = list(zip(*(s.values.tolist() for s in tensors.values()), strict=True))
    for rule in usual_rules(advice, has_tensors=table is not None):
        yield shadow(rule, norms, losses, tensor_norms=table)


def _threshold_lines(
    log: Run, advice: ThresholdAdvice, norms: list[float], at: list[float], shadows: list[Shadow]
) -> Iterator[str]:
    odd = f", {advice.num_nonfinite} not finite" if advice.num_nonfinite else ""
    yield f"{log.name}: {advice.num_norms:,} finite norms before clipping{odd}"
    yield ""
    yield f"{'threshold':>12}{'clips':>9}"
    wanted = {value: f"   the {q:.1%} quantile" for q, value in advice.quantiles.items()}
    wanted |= dict.fromkeys(at, "   asked for")
    for value in sorted(wanted):
        yield f"{value:12.4g}{advice.share_above(norms, value):9.2%}{wanted[value]}"
    yield ""
    width = max(len(s.rule) for s in shadows) + 2
    yield f"{'in shadow':{width}}{'clips':>8}{'coef.':>8}{'least':>8}{'skips':>8}"
    for s in shadows:
        ended = f"   ends the run at update {s.ended:,}" if s.ended is not None else ""
        yield (
            f"{s.rule:{width}}{s.clipped:8.1%}{s.mean_coefficient:8.3f}{s.least_coefficient:8.3f}"
            f"{s.num_skipped:8}{ended}"
        )
    yield ""
    yield from advice.words()


def _json(advice: ThresholdAdvice, shadows: list[Shadow]) -> str:
    values = dataclasses.asdict(advice)
    values["quantiles"] = [[q, norm] for q, norm in advice.quantiles.items()]
    values["drift"] = _finite(advice.drift)
    return jsons.dumps({**values, "shadows": [s.as_dict() for s in shadows]}, allow_nan=False)


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
