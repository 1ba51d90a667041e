"""The picture of the recompute trade-off: measured peak and time over k, beside L/k + k."""

from __future__ import annotations

from collections.abc import Sequence

from ..arithmetic import show_bytes
from .tradeoff import Tradeoff

__all__ = ["draw_tradeoff"]

_WIDTH, _HEIGHT, _LEFT, _TOP = 720, 420, 70, 60
_PLOT_WIDTH, _PLOT_HEIGHT = 560, 280


def draw_tradeoff(rows: Sequence[Tradeoff]) -> str:
    """Draw it as SVG: bars are measured peaks, the line is the model, numbers are times.

    Args:
        rows: As `measure_tradeoff` gives them: first without recompute.
    """
    plain, *chosen = rows
    step = _PLOT_WIDTH / len(rows)
    shares = [row.peak_bytes / plain.peak_bytes for row in rows]
    parts = [row.model_parts / plain.model_parts for row in chosen]
    top = 1.15 * max([*shares, *parts])

    def height(share: float) -> float:
        return _TOP + _PLOT_HEIGHT * (1 - share / top)

    bars = "".join(
        _bar(row, _LEFT + index * step, step, height(share))
        for index, (row, share) in enumerate(zip(rows, shares, strict=True))
    )
    dots = [(_LEFT + (index + 1.5) * step, height(part)) for index, part in enumerate(parts)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
    circles = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#c4572b"/>' for x, y in dots)
    marks = "".join(
        f'<text x="{_LEFT - 8}" y="{height(mark) + 4:.1f}" text-anchor="end">{mark:.0%}</text>'
        f'<line x1="{_LEFT}" x2="{_LEFT + _PLOT_WIDTH}" stroke="#dde3e8" '
        f'y1="{height(mark):.1f}" y2="{height(mark):.1f}"/>'
        for mark in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="13" fill="#1f2933">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
        f'<text x="{_LEFT}" y="24" font-size="16" font-weight="bold">Peak of forward and backward '
        f"by blocks run again together</text>"
        f'<text x="{_LEFT}" y="44">100 % is {show_bytes(plain.peak_bytes)}, without recompute; '
        f"over each bar its time</text>"
        f"{marks}{bars}"
        f'<polyline points="{line}" fill="none" stroke="#c4572b" stroke-width="2"/>{circles}'
        f'<text x="{_LEFT + _PLOT_WIDTH / 2}" y="{_TOP + _PLOT_HEIGHT + 40}" '
        f'text-anchor="middle">k, blocks that are run again together</text>'
        f'<rect x="{_LEFT}" y="{_HEIGHT - 26}" width="12" height="12" fill="#2f6f9f"/>'
        f'<text x="{_LEFT + 18}" y="{_HEIGHT - 15}">measured</text>'
        f'<line x1="{_LEFT + 110}" x2="{_LEFT + 134}" y1="{_HEIGHT - 20}" y2="{_HEIGHT - 20}" '
        f'stroke="#c4572b" stroke-width="2"/>'
        f'<text x="{_LEFT + 140}" y="{_HEIGHT - 15}">the model (L/k + k) / L</text>'
        f"</svg>\n"
    )


def _bar(row: Tradeoff, x: float, step: float, y: float) -> str:
    name = str(row.every) if row.every else "none"
    bottom, middle = _TOP + _PLOT_HEIGHT, x + step / 2
    return (
        f'<rect x="{x + 0.15 * step:.1f}" y="{y:.1f}" width="{0.7 * step:.1f}" '
        f'height="{bottom - y:.1f}" fill="{"#2f6f9f" if row.every else "#9aa5b1"}"/>'
        f'<text x="{middle:.1f}" y="{y - 6:.1f}" text-anchor="middle">'
        f"{row.relative_time:.2f}x</text>"
        f'<text x="{middle:.1f}" y="{bottom + 18}" text-anchor="middle">{name}</text>'
    )
