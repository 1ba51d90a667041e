"""Time alternatives on a machine that others use too.

Each round runs every alternative once, so that a slow moment hits all of them; what is printed is
the median over the rounds, and the median of each round's ratio to the first alternative.
"""

import datetime as dt
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch


def machine() -> str:
    """Say what ran where and when, in one line."""
    today = dt.datetime.now(tz=dt.UTC).date()
    return (
        f"{_processor()}, {torch.get_num_threads()} thread(s), Python "
        f"{platform.python_version()}, torch {torch.__version__}, {today}"
    )


def interleaved(
    ways: Mapping[str, Callable[[], object]], *, rounds: int = 15, warmup: int = 2
) -> dict[str, tuple[float, float]]:
    """Run every way once a round, and give each its median seconds and its ratio to the first.

    Args:
        ways: What to time, by name.
        rounds: How often each is timed.
        warmup: Rounds before those, which are not counted.

    Returns:
        Median seconds, and the median of the ratios within a round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(warmup + rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if index >= warmup:
                seconds[name].append(time.perf_counter() - started)
    first = seconds[next(iter(ways))]
    return {
        name: (
            statistics.median(own),
            statistics.median(a / b for a, b in zip(own, first, strict=True)),
        )
        for name, own in seconds.items()
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()
