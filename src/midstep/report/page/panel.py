"""A panel: one chart, what it is of, and where its values come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..run import Run
from .charts import Chart, line_chart
from .tables import SMOOTHED, TABLE, Table

__all__ = ["Line", "Panel", "constant", "having", "joined", "plain", "smoothed"]

_SMOOTH_FROM = 100  # updates; shorter runs are drawn as they are


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a panel, drawn from one column of one run.

    Attributes:
        run: Index of the run.
        column: The name of the column in what the page is given.
        group: What its colour stands for.
        dashed: Whether it is a limit rather than a measurement.
        opacity: From 0 to 1.
        width: In pixels.
    """

    run: int
    column: str
    group: str
    dashed: bool = False
    opacity: float = 1.0
    width: float = 1.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart with what it shows.

    Attributes:
        id: A word, also the name of its picture.
        title: What is drawn.
        note: In which unit, how it is to be read.
        size: "wide", "half" or "third" of the page.
        height: Of the chart, in pixels.
        chart: How it is drawn.
        lines: From columns; thinned by the page as it is zoomed.
        tables: What is drawn as it is, by the name the chart reads it under.
        groups: What the colours stand for.
        log: Whether only positive values can be drawn.
    """

    id: str
    title: str
    note: str
    size: str
    height: int
    chart: Chart
    lines: Sequence[Line] = ()
    tables: Mapping[str, Table] = dataclasses.field(default_factory=dict)
    groups: Sequence[str] = ()
    log: bool = False


def plain(
    runs: Sequence[Run],
    indices: Sequence[int],
    column: str,
    *,
    id: str,  # noqa: A002 - as in `Panel`
    title: str,
    note: str,
    unit: str,
    log: bool = False,
    zero: bool = False,
    format: str = "~g",  # noqa: A002 - altair's own name
    base: int = 10,
    width: float = 1.5,
) -> Panel | None:
    """Draw one column of each run.

    Args:
        runs: All of them.
        indices: Of those that have the column.
        column: Its name.
        id: As in `Panel`.
        title: As in `Panel`.
        note: As in `Panel`.
        unit: Title of the vertical axis.
        log: A logarithmic vertical axis.
        zero: The vertical axis begins at 0.
        format: Of its labels.
        base: Of the logarithm.
        width: Of the line, in pixels.

    Returns:
        None where no run has the column.
    """
    if not indices:
        return None
    groups = [run.name for run in runs]
    return Panel(
        id=id,
        title=title,
        note=note,
        size="third",
        height=170,
        chart=line_chart(unit, groups, log=log, zero=zero, format=format, base=base),
        lines=list(smoothed(runs, indices, column, groups, width)),
        groups=groups,
        log=log,
    )


def smoothed(
    runs: Sequence[Run],
    indices: Sequence[int],
    column: str,
    groups: Sequence[str],
    width: float = 1.6,
) -> Iterator[Line]:
    """A line of every value; where they are many and noisy a faint one, and one of means.

    Args:
        runs: All of them.
        indices: Of those that have the column.
        column: Its name.
        groups: What the colours stand for.
        width: Of a line that is not smoothed, in pixels.
    """
    for index in indices:
        group = groups[index if len(runs) > 1 else 0]
        if column in SMOOTHED and len(runs[index]) >= _SMOOTH_FROM:
            yield Line(run=index, column=column, group=group, opacity=0.32, width=1.0)
            yield Line(run=index, column=f"{column}{TABLE}", group=group, width=2.2)
        else:
            yield Line(run=index, column=column, group=group, width=width)


def having(runs: Sequence[Run], column: str) -> list[int]:
    """Which runs have recorded a column.

    Args:
        runs: All of them.
        column: Its name.
    """
    return [index for index, run in enumerate(runs) if run.has(column)]


def constant(length: int, **values: Any) -> Table:
    """Give columns that hold one value throughout.

    Args:
        length: Of each.
        values: By name.
    """
    return {name: [value] * length for name, value in values.items()}


def joined(tables: Iterable[Table]) -> Table:
    """Put tables of the same columns under each other.

    Args:
        tables: Each a mapping of columns.
    """
    result: Table = {}
    for table in tables:
        for name, values in table.items():
            result.setdefault(name, []).extend(values)
    return result
