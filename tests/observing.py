"""What tests of observers share: a few updates, and a count of what they compute."""

from collections import Counter
from typing import Any

from plain_loop import loss_sum, pairs
from torch.utils._python_dispatch import TorchDispatchMode

import midstep as ms


def run(updater: ms.Updater, count: int = 1) -> list[ms.UpdateRecord]:
    return [
        updater.update(pairs(3, 2, 4, seed=seed), loss_sum, count=ms.targets())
        for seed in range(count)
    ]


class Calls(TorchDispatchMode):
    """Counts what reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def calls_of(updater: ms.Updater) -> Counter[str]:
    """What the second update computes; the first makes the state of the optimizer."""
    run(updater)
    calls = Calls()
    with calls:
        run(updater)
    return calls.seen
