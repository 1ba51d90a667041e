"""What observers cost: updates of the recipe `language`, with none, the default ones, and all.

Beside them the norm of each microbatch alone, by hooks as it is measured, and by the difference
that it makes to `.grad`.

Run by hand, on a quiet machine:

    OMP_NUM_THREADS=1 python benchmarks/observers.py

One run each, all on the same batches from the same weights, take turns of ten updates, in an order
that turns with them; a ratio is taken within each turn, of the processor's time, which other
processes disturb less than the clock's. The weights must come out the same.
"""

import itertools
import math
import statistics
import time

import torch
from timing import machine

from midstep.gradients import tensor_norms
from midstep.observers import Microbatches, Observer, Reading
from midstep.observers.observer import OpenWindow, Subject
from midstep.recipes.language import language
from midstep.recipes.observing import default_observers, every_observer
from midstep.updater import Updater

NUM_TURNS = 15
NUM_UNCOUNTED = 1
UPDATES = 10  # so that each turn has the same number of updates that are due


class Difference(Observer):
    """The norm of each microbatch by what its backward changed: a copy and a subtraction."""

    watches_microbatches = True

    def begin(self, subject: Subject, window: OpenWindow, started: float) -> None:
        """Begin with no gradient."""
        self._parameters = subject.parameters
        self._copies = [torch.zeros_like(p) for p in subject.parameters]
        self._norms: list[float] = []

    def after_backward(self, index: int) -> None:
        """Take what was there before from what is there now."""
        grads = [p.grad for p in self._parameters]
        torch._foreach_sub_(self._copies, grads)
        self._norms.append(math.hypot(*tensor_norms(self._copies)))
        torch._foreach_copy_(self._copies, grads)

    def read(self) -> list[Reading]:
        """Give the norms."""
        return [Reading(self._norms, lambda norms: {"microbatch_grad_norms": norms})]


class Run:
    """A run of its own, over the same four windows again and again."""

    def __init__(self, observers: list[Observer]) -> None:
        self.recipe = recipe = language(seed=0)
        self.updater = Updater(
            recipe.model,
            recipe.optimizer(recipe.model, recipe.lr),
            clip=recipe.clip,
            observers=observers,
        )
        batches = list(itertools.islice(recipe.train, 16))
        self._windows = itertools.cycle([batches[i : i + 4] for i in range(0, 16, 4)])
        self.num_bytes = 0

    def turn(self) -> float:
        """Make ten updates and their lines, and give the processor's seconds."""
        started = time.process_time()
        for _ in range(UPDATES):
            window = next(self._windows)
            record = self.updater.update(window, self.recipe.loss, count=self.recipe.count)
            self.num_bytes = len(record.to_json())
        return time.process_time() - started


def main() -> None:
    """Time the runs in turns and print a table."""
    ways = {"none": [], "default": default_observers(), "every": every_observer()}
    ways |= {"microbatches": [Microbatches()], "difference": [Difference()]}
    runs = {name: Run(observers) for name, observers in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(NUM_UNCOUNTED + NUM_TURNS):
        for name in names[turn % 5 :] + names[: turn % 5]:
            seconds = runs[name].turn()
            if turn >= NUM_UNCOUNTED:
                times[name].append(seconds)
    print(f"{machine()}, {NUM_TURNS} turns of {UPDATES} updates\n")
    print(f"{'observers':<14}{'ms an update':<14}{'of none':<28}bytes of the last line")
    for name, run in runs.items():
        ratios = [a / b for a, b in zip(times[name], times["none"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        median = statistics.median(times[name]) / UPDATES * 1e3
        print(f"{name:<14}{median:<14.1f}{middle:.3f} ({low:.3f} to {high:.3f})", end="")
        print(f"{'':<7}{run.num_bytes:,}")
    plain = list(runs["none"].recipe.model.parameters())
    for name in names[1:]:
        others = runs[name].recipe.model.parameters()
        assert all(torch.equal(a, b) for a, b in zip(plain, others, strict=True)), name


if __name__ == "__main__":
    main()
