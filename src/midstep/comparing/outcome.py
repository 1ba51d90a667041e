"""The outcome: one row a variant, and which differences are larger than the spread."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..clip.quantile import quantile
from ..records import UpdateRecord
from .cell import Ending, ending_of
from .chance import half_width
from .grid import Cell

__all__ = ["Comparison", "Row", "rows_of"]
_MORE = "More seeds make them narrower, 5 instead of 3 about three times."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant over its seeds. Norms, shares and coefficients are those of applied updates.

    Attributes:
        variant: In words.
        held_out: Last held-out loss of each seed; inf for one that was lost.
        num_lost: Seeds whose run blew up or was no longer finite.
        targets: Supervised targets that were trained on, mean over the seeds.
        clipped: Share of updates that were clipped.
        norms: 50, 90 and 99 % quantile of finite norms before clipping.
        mean_coefficient: Mean of norm after clipping over norm before.
        least_coefficient: Smallest of them: the hardest clip.
        update_norm: Median size of the actual update, where it was observed.
        num_skipped: Skipped updates, all seeds.
        seconds: In updates, mean over the seeds.
    """

    variant: str
    held_out: tuple[float, ...]
    num_lost: int
    targets: float
    clipped: float
    norms: tuple[float, float, float]
    mean_coefficient: float
    least_coefficient: float
    update_norm: float | None
    num_skipped: int
    seconds: float

    @property
    def mean(self) -> float:
        """Mean held-out loss; inf where a seed was lost."""
        return statistics.fmean(self.held_out)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds; None where it is not known."""
        is_known = len(self.held_out) > 1 and math.isfinite(self.mean)
        return statistics.stdev(self.held_out) if is_known else None


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Every variant, the best first, with what can be said of their differences.

    Attributes:
        rows: By mean held-out loss.
    """

    rows: tuple[Row, ...]

    def differences(self) -> list[tuple[str, float, float | None]]:
        """Compare each variant with the best, seed by seed.

        The same seed gives the same first weights and the same data, so that differences are taken
        within seeds: their spread is smaller than that of the losses.

        The best was chosen by the losses it is compared by, so the intervals are widened for all
        pairs of variants: they hold together 95 times in 100.

        Returns:
            Variant, mean difference of held-out loss, and the half-width of its interval; None for
            one seed, of which nothing can be said.
        """
        best = self.rows[0]
        found = []
        for row in self.rows[1:]:
            pairs = [other - one for one, other in zip(best.held_out, row.held_out, strict=True)]
            mean = statistics.fmean(pairs) if all(map(math.isfinite, pairs)) else math.inf
            half = half_width(pairs, num_pairs=self.num_pairs) if math.isfinite(mean) else None
            found.append((row.variant, mean, half))
        return found

    @property
    def num_pairs(self) -> int:
        """Pairs of variants, each of which might have been looked at."""
        return len(self.rows) * (len(self.rows) - 1) // 2

    def table(self) -> list[tuple[str, ...]]:
        """Give the table as text, its heading first."""
        return [_HEADING, *((row.variant, *_cells(row)) for row in self.rows)]

    def lines(self) -> Iterator[str]:
        """Give the table, and what it shows in words."""
        table = self.table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for first, *others in table:
            cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
            yield "  ".join([f"{first:{widths[0]}}", *cells])
        yield ""
        yield from self.words()

    def words(self) -> Iterator[str]:
        """Say which differences are larger than the spread, and on what it rests."""
        best = self.rows[0]
        num_seeds = len(best.held_out)
        if not math.isfinite(best.mean):
            yield "every variant lost a run"
            return
        yield f"best: {best.variant}, {best.mean:.4f} over {num_seeds} seed{'s' * (num_seeds > 1)}"
        for variant, mean, half in self.differences():
            if not math.isfinite(mean):
                yield f"  {variant}: lost"
            elif half is None:
                yield f"  {variant}: {mean:+.4f}; of one seed, so that it may be chance"
            else:
                verdict = "larger than the spread" if abs(mean) > half else "within the spread"
                yield f"  {variant}: {mean:+.4f} +- {half:.4f}, {verdict}"
        if num_seeds > 1 and len(self.rows) > 2:
            yield (
                f"The intervals are widened for the {self.num_pairs} pairs of {len(self.rows)} "
                "variants among which the best was chosen (Bonferroni): all hold together 95 "
                f"times in 100. {_MORE if num_seeds < 5 else ''}".rstrip()
            )
        yield self._budget()

    def _budget(self) -> str:
        """Say how much each variant was trained on; a lost run is left out, for it stopped."""
        seen = [row.targets for row in self.rows if not row.num_lost]
        if not seen:
            return "no variant was trained to its end"
        least, most = min(seen), max(seen)
        if most - least < 0.005 * most:
            return f"Each was trained on {most:,.0f} targets."
        return f"They were trained on {least:,.0f} to {most:,.0f} targets: not the same budget."

    def to_json(self) -> str:
        """Give rows and differences as one line of strict JSON; inf is a string."""
        rows = [_plain(dataclasses.asdict(row)) for row in self.rows]
        differences = [
            {"variant": variant, "difference": _plain(mean), "half_width": half}
            for variant, mean, half in self.differences()
        ]
        found = {"rows": rows, "differences": differences, "num_pairs": self.num_pairs}
        return json.dumps(found, allow_nan=False)


def rows_of(cells: Sequence[Cell]) -> Comparison:
    """Read what the cells left, and put the best first.

    Args:
        cells: All of them ended.
    """
    variants: dict[str, list[Cell]] = {}
    for cell in cells:
        variants.setdefault(cell.variant.name, []).append(cell)
    rows = [_row(name, members) for name, members in variants.items()]
    return Comparison(tuple(sorted(rows, key=lambda row: (row.mean, row.num_lost))))


def _row(name: str, cells: Sequence[Cell]) -> Row:
    records = [list(_records(cell.path)) for cell in cells]
    applied = [record for run in records for record in run if record.applied]
    norms = [r.grad_norm for r in applied if r.grad_norm is not None and math.isfinite(r.grad_norm)]
    coefficients = [r.clip_coefficient for r in applied if r.clip_coefficient is not None] or [1.0]
    sizes = [r.extra["update_norm"] for r in applied if "update_norm" in r.extra]
    is_lost = [ending_of(cell.path) is not Ending.COMPLETE for cell in cells]
    return Row(
        variant=name,
        held_out=tuple(
            math.inf if lost else _last_held_out(cell.path)
            for cell, lost in zip(cells, is_lost, strict=True)
        ),
        num_lost=sum(is_lost),
        targets=sum(sum(r.denominators.values()) for run in records for r in run) / len(cells),
        clipped=sum(r.clipped for r in applied) / max(1, len(applied)),
        norms=_norm_quantiles(norms),
        mean_coefficient=statistics.fmean(coefficients),
        least_coefficient=min(coefficients),
        update_norm=statistics.median(sizes) if sizes else None,
        num_skipped=sum(not r.applied for run in records for r in run),
        seconds=sum(r.seconds for run in records for r in run) / len(cells),
    )


def _records(path: Path) -> Iterator[UpdateRecord]:
    with (path / "updates.jsonl").open(encoding="utf-8") as file:
        yield from (UpdateRecord.from_json(line) for line in file if line.endswith("\n"))


def _last_held_out(path: Path) -> float:
    lines = (path / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    return float(json.loads(lines[-1])["loss_mean"])


def _norm_quantiles(norms: Sequence[float]) -> tuple[float, float, float]:
    if not norms:
        return math.nan, math.nan, math.nan
    return quantile(norms, 0.5), quantile(norms, 0.9), quantile(norms, 0.99)


_HEADING = (
    *("variant", "held-out", "spread", "clipped", "norm 50%", "90%", "99%", "coef.", "least"),
    *("update", "skipped", "s"),
)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row.mean:.4f}" if math.isfinite(row.mean) else "lost",
        f"{row.spread:.4f}" if row.spread is not None else "-",
        f"{row.clipped:.1%}",
        *(f"{norm:.3g}" for norm in row.norms),
        f"{row.mean_coefficient:.2f}",
        f"{row.least_coefficient:.2f}",
        f"{row.update_norm:.3g}" if row.update_norm is not None else "-",
        f"{row.num_skipped}",
        f"{row.seconds:.1f}",
    )


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
