"""Time alternatives on a machine that others use too.

Each round runs every alternative once, so that a slow moment hits all of them; what is printed is
the median over the rounds, and the median of each round's ratio to the first alternative.
"""

import datetime as dt
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch


def machine() -> str:
    """Say what ran where and when, in one line."""
    today = dt.datetime.now(tz=dt.UTC).date()
    return (
        f"{_processor()}, {torch.get_num_threads()} thread(s), Python "
        f"{platform.python_version()}, torch {torch.__version__}, {today}"
    )


def paired(
    ways: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 15,
    warmup: int = 2,
    prepare: Mapping[str, Callable[[], object]] = MappingProxyType({}),
    ready: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Run every way once a round, in turns, and give the seconds of each round.

    Every round has another order, the same in each run, so that what a way leaves behind (a cold
    cache, freed pages) does not always meet the same neighbour.

    Args:
        ways: What to time, by name.
        rounds: How often each is timed.
        warmup: Rounds before those, which are not counted.
        prepare: What is called before a way, by its name, and not timed.
        ready: Waits until a device has done what was asked of it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names, order = list(ways), random.Random(0)
    for index in range(warmup + rounds):
        for name in order.sample(names, len(names)):
            prepare.get(name, lambda: None)()
            ready()
            started = time.perf_counter()
            ways[name]()
            ready()
            if index >= warmup:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def ratios(own: Sequence[float], peer: Sequence[float]) -> list[float]:
    """The ratio of each round, so that a slow moment of the machine meets both."""
    return [a / b for a, b in zip(own, peer, strict=True)]


def spread(values: Sequence[float]) -> str:
    """The median, and the quartiles in brackets."""
    low, _, high = statistics.quantiles(values, n=4)
    return f"{statistics.median(values):.3g} ({low:.3g} to {high:.3g})"


def interleaved(
    ways: Mapping[str, Callable[[], object]], *, rounds: int = 15, warmup: int = 2
) -> dict[str, tuple[float, float]]:
    """Give each way its median seconds, and the median of its ratios to the first.

    Args:
        ways: What to time, by name.
        rounds: How often each is timed.
        warmup: Rounds before those, which are not counted.
    """
    seconds = paired(ways, rounds=rounds, warmup=warmup)
    first = seconds[next(iter(ways))]
    return {
        name: (statistics.median(own), statistics.median(ratios(own, first)))
        for name, own in seconds.items()
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()
