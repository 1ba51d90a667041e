"""Whether a range test finds a rate that trains well, and what the suggestions of others are.

Run by hand; the recipe `language` takes most of the time:

    OMP_NUM_THREADS=2 python benchmarks/range_test.py            # all recipes, both optimizers
    OMP_NUM_THREADS=2 python benchmarks/range_test.py digits     # one of them
    OMP_NUM_THREADS=2 python benchmarks/range_test.py --constant # at one rate

For each recipe and optimizer: a range test of three sweeps of 80 points, of twice as many points
while its confidence is low or it finds no fall; then whole trainings of 400 updates at a third of
the upper bound, at the bound, at three times the bound, and at the ceiling, from three seeds. The
rate is the peak of the recipe's schedule, or constant with `--constant`. Two rates are equal when
the mean difference within seeds is smaller than its 95 % interval.

Before that the curves of `tests/data/curves`, read here and by the rules of fastai 2.8 (valley),
Lightning 2.6 and torch-lr-finder 0.2, as their sources state them.
"""

import csv
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

import midstep as ms
from midstep.comparing.chance import half_width
from midstep.range_test import Confidence, Curve, RangeTest, lr_range, read_curves
from midstep.recipes.held_out import measure
from midstep.recipes.loading import BUILT_IN, load_recipe

STEPS = 400
CURVES = Path(__file__).parents[1] / "tests" / "data" / "curves"

Make = Callable[[nn.Module, float], torch.optim.Optimizer]


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


OPTIMIZERS: dict[str, Make] = {"SGD, momentum 0.9": sgd, "AdamW": adamw}


def made(
    name: str, make: Make, lr: float, seed: int, *, scheduled: bool = False
) -> tuple[ms.Recipe, ms.Updater]:
    recipe = dataclasses.replace(load_recipe(name, seed=seed), optimizer=make)
    updater = ms.Updater(
        recipe.model,
        recipe.optimizer(recipe.model, lr),
        clip=recipe.clip,
        nonfinite=ms.Skip(),
        schedule=recipe.schedule(STEPS) if scheduled and recipe.schedule is not None else None,
    )
    return recipe, updater


def swept(name: str, make: Make) -> RangeTest:
    """Sweep with as many points as suit such trainings, with more while the answer is unsure."""
    num_updates = STEPS // 5
    while True:
        recipe, updater = made(name, make, 1e-3, seed=0)
        found = lr_range(
            updater,
            recipe.train,
            recipe.loss,
            size=recipe.size,
            rows=recipe.rows,
            targets=recipe.targets,
            count=recipe.count,
            num_updates=num_updates,
            repeats=3,
        )
        is_sure = found.reading.confidence in (Confidence.HIGH, Confidence.MEDIUM)
        if is_sure or num_updates >= STEPS:
            return found
        num_updates *= 2


def trained(name: str, make: Make, lr: float, seed: int, *, scheduled: bool) -> float:
    """Held-out loss after 400 updates at this rate; inf for a run that was lost."""
    recipe, updater = made(name, make, lr, seed, scheduled=scheduled)
    num_lost = 0
    while updater.clock.step < STEPS:
        for window in updater.windows(
            recipe.train,
            size=recipe.size,
            rows=recipe.rows,
            targets=recipe.targets,
            count=recipe.count,
        ):
            record = updater.update(window, recipe.loss)
            num_lost = 0 if record.applied else num_lost + 1
            if num_lost == 20:
                return math.inf
            if updater.clock.step >= STEPS:
                break
    held_out = measure(recipe, precision=ms.FP32(), step=STEPS, update=STEPS)
    assert held_out is not None
    return held_out.loss_mean if math.isfinite(held_out.loss_mean) else math.inf


def bench_setting(name: str, label: str, *, scheduled: bool) -> bool:
    """Print one setting; say whether the upper bound beats or equals both of its neighbours."""
    make, started = OPTIMIZERS[label], time.perf_counter()
    found = swept(name, make)
    reading = found.reading
    if reading.upper is None or reading.ceiling is None:
        print(f"{name}, {label}: {reading}", flush=True)
        return False
    upper = reading.upper.lr
    rates = {"upper": upper, "upper / 3": upper / 3, "3 upper": 3 * upper}
    rates["ceiling"] = reading.ceiling.lr
    seeds = range(3)
    losses = {
        what: [trained(name, make, lr, seed, scheduled=scheduled) for seed in seeds]
        for what, lr in rates.items()
    }
    points = len(found.curves[0].lr)
    print(f"\n{name}, {label}: read from 3 sweeps of up to {points} points, {reading.confidence}")
    is_good = True
    for what, lr in rates.items():
        pairs = [x - y for x, y in zip(losses[what], losses["upper"], strict=True)]
        mean, half = statistics.fmean(pairs), half_width(pairs) or 0.0
        verdict = "worse" if mean > half else "better" if mean < -half else "equal"
        shown = "" if what == "upper" else f"{mean:+.4f} +- {half:.4f}, {verdict}"
        print(f"  {what:10}{lr:9.1e}{statistics.fmean(losses[what]):9.4f}   {shown}", flush=True)
        is_good &= what in ("upper", "ceiling") or verdict != "better"
    print(f"  {time.perf_counter() - started:.0f} s", flush=True)
    return is_good


def bench_trainings(names: list[str], *, scheduled: bool) -> None:
    settings = [(name, label) for name in names for label in OPTIMIZERS]
    good = sum(bench_setting(name, label, scheduled=scheduled) for name, label in settings)
    print(f"the upper bound beats or equals both neighbours in {good} of {len(settings)}")


def valley(lr: np.ndarray, loss: np.ndarray) -> float:
    """The longest falling subsequence, taken as one stretch, and its middle (fastai's `valley`)."""
    lengths, start, end = [1] * len(loss), 0, 0
    for i in range(1, len(loss)):
        for j in range(i):
            if loss[i] < loss[j] and lengths[i] < lengths[j] + 1:
                lengths[i] = lengths[j] + 1
            if lengths[end] < lengths[i]:
                start, end = i - lengths[i], i
    third = (end - start) / 3
    return float(lr[start + int(third) + int(third / 2)])


def smoothed(loss: np.ndarray, beta: float, *, debiased: bool) -> np.ndarray:
    average, out = (0.0 if debiased else loss[0]), []
    for index, value in enumerate(loss):
        average = beta * average + (1 - beta) * value
        out.append(average / (1 - beta ** (index + 1)) if debiased else average)
    return np.array(out)


def fastai(lr: np.ndarray, loss: np.ndarray) -> float:
    y = smoothed(loss, 0.98, debiased=True)
    start = len(y) // 10
    return valley(lr[start:-5], y[start:-5])


def lightning(lr: np.ndarray, loss: np.ndarray) -> float:
    average, y = 0.0, []
    for index, value in enumerate(loss):
        average = 0.98 * average + 0.02 * value
        y.append(average / (1 - 0.98 ** (index + 2)))  # one too many, as there
    slope = np.gradient(np.array(y[10:-1]), lr[10:-1])
    return float(lr[10 + int(np.argmin(slope))])


def torch_lr_finder(lr: np.ndarray, loss: np.ndarray) -> float:
    y = smoothed(loss, 0.95, debiased=False)[10:-5]
    return float(lr[10 + int(np.argmin(np.gradient(y)))])


def bench_curves() -> None:
    print(
        f"\n{'curve':18}{'lower':>10}{'upper':>10}{'ceiling':>10}{'fastai':>10}{'Lightning':>11}{'lr-finder':>11}"
    )
    for path in sorted(CURVES.glob("*.csv")):
        with path.open() as file:
            rows = list(csv.DictReader(file))
        lr, loss = (np.array([float(row[name]) for row in rows]) for name in ("lr", "loss"))
        reading = read_curves([Curve(lr.tolist(), loss.tolist())])
        bounds = (reading.lower, reading.upper, reading.ceiling)
        ours = "".join(f"{'-' if b is None else f'{b.lr:.1e}':>10}" for b in bounds)
        finite = np.isfinite(loss)
        others = (rule(lr[finite], loss[finite]) for rule in (fastai, lightning, torch_lr_finder))
        print(
            f"{path.stem:18}{ours}"
            + "".join(f"{x:>{w}.1e}" for x, w in zip(others, (10, 11, 11), strict=True))
        )


if __name__ == "__main__":
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    bench_curves()
    names = [name for name in sys.argv[1:] if name != "--constant"]
    bench_trainings(names or list(BUILT_IN), scheduled="--constant" not in sys.argv)
