"""`midstep schedule`: the rate that each update uses, before any is made."""

from __future__ import annotations

import json as jsons
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from . import declarations as given
from .failures import FINE, attempt

if TYPE_CHECKING:
    import altair as alt

    from ..schedules.conventions import Family, Wish

__all__ = ["schedule"]

_ALIASES = {"wsd": "warmup_stable_decay"}

Name: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="constant, linear, cosine, polynomial, inverse_sqrt or warmup_stable_decay (wsd); "
        "warmup_cosine is cosine.",
        show_default=False,
    ),
]
Peak: TypeAlias = Annotated[
    float, typer.Option(metavar="RATE", help="The base rate, which the schedule multiplies.")
]
Total: TypeAlias = Annotated[
    int,
    typer.Option(
        metavar="N", help="Updates of the run, warm-up included; epochs with --per-epoch."
    ),
]
Warmup: TypeAlias = Annotated[int, typer.Option(metavar="N", help="Updates of the linear rise.")]
Stable: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Updates at the peak; only wsd. Default: all but the last fifth."
    ),
]
Minimum: TypeAlias = Annotated[
    float, typer.Option(metavar="SHARE", help="Where it ends, as a share of the peak.")
]
Power: TypeAlias = Annotated[float, typer.Option(metavar="P", help="Exponent of polynomial.")]
PerEpoch: TypeAlias = Annotated[
    bool,
    typer.Option("--per-epoch", help="The schedule counts epochs: one rate for a whole epoch."),
]
Picture: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw it, as .png, .svg or .html."),
]
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one line of JSON, every rate included.")
]


def schedule(  # noqa: PLR0917 - an option of the command is an argument here
    name: Name,
    peak: Peak = 1.0,
    total: Total = 100,
    warmup: Warmup = 0,
    stable: Stable = None,
    minimum: Minimum = 0.0,
    power: Power = 2.0,
    per_epoch: PerEpoch = False,
    picture: Picture = None,
    json: Json = False,
    traceback: given.Traceback = False,
) -> int:
    """Show a schedule: which rate each update uses, and where other libraries differ.

    Nothing is trained. A skipped update does not move a schedule, so it is the applied updates that
    are counted.
    """

    def action() -> int:
        from ..pictures import check_picture_path, save_picture
        from ..schedules.conventions import Family, Wish

        if picture is not None:
            check_picture_path(picture)
        if not 0 < peak < math.inf:
            raise ValueError(f"`--peak {peak}`: a rate must be greater than 0 and finite")
        family = _family(name)
        if stable is not None and family is not Family.WARMUP_STABLE_DECAY:
            raise ValueError(f"`--stable {stable}`: only `wsd` stays at its peak, not `{family}`")
        at_peak = max(0, total - warmup - max(1, total // 5)) if stable is None else stable
        wish = Wish(
            family=family,
            total=total,
            warmup=warmup,
            stable=at_peak,
            minimum=minimum,
            power=power,
        )
        unit = "epoch" if per_epoch else "update"
        lines = [jsons.dumps(_values(wish, peak, unit))] if json else list(_lines(wish, peak, unit))
        for line in lines:
            typer.echo(line)
        if picture is not None:
            title = f"{wish.family} over {total:,} {unit}s"
            save_picture(_drawn(wish, peak, unit, title), picture, title=title)
        return FINE

    return attempt(action, traceback=traceback)


def _family(name: str) -> Family:
    from ..schedules.conventions import Family

    plain = name.lower().replace("-", "_")
    plain = _ALIASES.get(plain, plain)
    names = [family.value for family in Family]
    if plain not in names:
        plain = plain.removeprefix("warmup_")
    if plain not in names:
        raise ValueError(f"`{name}` is no schedule. The names are {', '.join(names)}")
    return Family(plain)


def _values(wish: Wish, peak: float, unit: str) -> dict[str, object]:
    import dataclasses

    from ..schedules.facts import Facts

    own = wish.schedule()
    return {
        **dataclasses.asdict(wish),
        "peak_lr": peak,
        "unit": unit,
        "lr": [peak * own(step) for step in range(wish.total)],
        "conventions": {
            name: dataclasses.asdict(Facts.of(schedule, wish.total))
            for name, schedule in wish.conventions().items()
        },
    }


def _lines(wish: Wish, peak: float, unit: str) -> Iterator[str]:
    from ..schedules.facts import Facts

    own = wish.schedule()
    facts = Facts.of(own, wish.total)
    after = "epoch" if unit == "epoch" else "applied update"
    yield f"{wish.family}, one rate an {unit}: it moves once after each {after}"
    yield ""
    for number in _landmarks(wish):
        rate = peak * own(number - 1)
        yield f"{unit} {number:>9,}   {rate:.4e}   {own(number - 1):8.3%}   {_bar(own(number - 1))}"
    yield ""
    ends = f"first {peak * facts.first:.3e}, last {peak * facts.last:.3e}"
    yield f"{ends}, peak in {unit} {facts.peak_update:,}"
    yield (
        f"area {peak * facts.area:.4g}: as far as {facts.area:,.1f} {unit}s at the peak, "
        f"{facts.area / wish.total:.1%} of {wish.total:,}"
    )
    if unit == "epoch":
        yield from _ends_of_epochs(wish)
    yield from _table(wish, peak)


def _landmarks(wish: Wish) -> list[int]:
    """Numbers of updates, from 1, where something happens, and some between."""
    total = wish.total
    marks = {1, 2, wish.warmup, wish.warmup + 1, wish.warmup + wish.stable, total - 1, total}
    marks |= {round(1 + (total - 1) * share / 10) for share in range(11)}
    return sorted(number for number in marks if 1 <= number <= total)


def _bar(factor: float) -> str:
    return "#" * round(40 * max(0.0, min(1.0, factor)))


def _ends_of_epochs(wish: Wish) -> Iterator[str]:
    """Show what moving the schedule at the wrong end of an epoch does to a warm-up."""
    own = wish.schedule()
    num = min(wish.total, max(4, wish.warmup + 1), 8)
    right = ", ".join(f"{own(epoch):.0%}" for epoch in range(num))
    wrong = ", ".join(f"{own(epoch + 1):.0%}" for epoch in range(num))
    yield ""
    yield f"moved at the end of each epoch    {right}, ..."
    yield f"moved at the start of each epoch  {wrong}, ...  the first rate is never used"


def _table(wish: Wish, peak: float) -> Iterator[str]:
    from ..schedules.facts import Facts

    found = {name: Facts.of(s, wish.total) for name, s in wish.conventions().items()}
    if len(found) == 1:
        return
    width = max(len(name) for name in found) + 2
    yield ""
    columns = f"{'first':>11}{'peak in':>10}{'last':>11}{'area':>10}   after the end"
    yield f"{'the same wish in':{width}}{columns}"
    for name, facts in found.items():
        on = f"{facts.peak_update:,}" if facts.peak >= 1 - 1e-12 else "never"
        yield (
            f"{name:{width}}{peak * facts.first:>11.3e}{on:>10}{peak * facts.last:>11.3e}"
            f"{peak * facts.area:>10.4g}   {peak * facts.after:.3e}"
        )


def _drawn(wish: Wish, peak: float, unit: str, title: str) -> alt.TopLevelMixin:
    """Draw the rates, and below by how much each convention is apart from this library's."""
    import altair as alt

    from ..pictures import rows

    own, every = wish.schedule(), max(1, wish.total // 1000)
    steps = sorted({*range(0, wish.total, every), wish.total - 1, max(0, wish.warmup - 1)})
    values = [
        {
            "step": step + 1,
            "lr": peak * schedule(step),
            "apart": schedule(step) - own(step),
            "convention": name,
        }
        for name, schedule in wish.conventions().items()
        for step in steps
    ]
    base = alt.Chart(rows(values)).encode(
        color=alt.Color("convention:N", title=None, sort=list(wish.conventions())),
        strokeWidth=alt.condition("datum.convention == 'midstep'", alt.value(3), alt.value(1.5)),
        tooltip=[
            alt.Tooltip("convention:N"),
            alt.Tooltip("step:Q"),
            alt.Tooltip("lr:Q", format=".4e"),
            alt.Tooltip("apart:Q", format="+.2%"),
        ],
    )
    line = base.mark_line(interpolate="step-after", clip=True)
    number = "datum.value == 0 ? '0' : format(datum.value, '~e')"
    rate = alt.Y("lr:Q", title="learning rate", axis=alt.Axis(labelExpr=number))
    axis = alt.Axis(tickCount=10)
    numbered = alt.X("step:Q", title=unit, scale=alt.Scale(nice=False), axis=axis)
    if len(wish.conventions()) == 1:
        alone: alt.TopLevelMixin = line.encode(numbered, rate)
        return alone.properties(width=720, height=320, title=title)
    gap = alt.Y("apart:Q", title="apart, of the peak", axis=alt.Axis(format="+~%", tickCount=5))
    above = line.encode(numbered.title(None), rate).properties(width=720, height=280)
    below = line.encode(numbered, gap).properties(width=720, height=130)
    drawn: alt.TopLevelMixin = alt.vconcat(above, below, spacing=18).properties(title=title)
    return drawn
