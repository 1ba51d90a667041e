"""What midstep costs beside the plain loop, where it could show: a model that takes no time.

Run by hand, on a quiet machine:

    OMP_NUM_THREADS=1 python benchmarks/overhead.py

A Linear(8, 8) on 8 rows, SGD, clipped to norm 1, windows of 4: nearly all of the time is Python.
On a model that computes for longer than it is asked, the ratios go to 1. The loops take turns, so
that a slow moment of the machine meets all of them; a ratio is taken within each turn.
"""

import datetime as dt
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import midstep as ms

NUM_BATCHES = 2_000
WINDOW = 4
NUM_PAIRS = 9

Data = list[tuple[Tensor, Tensor]]


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def plain_loop(data: Data) -> None:
    """The loop of the tutorials: divide, backward, clip, step, clear."""
    model, optimizer = made()
    for index, (x, y) in enumerate(data, start=1):
        loss = F.mse_loss(model(x), y)
        (loss / WINDOW).backward()
        if index % WINDOW == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def logged_loop(data: Data) -> None:
    """The same, with what a record holds: the mean loss and the norm, read once an update."""
    model, optimizer = made()
    total = 0.0
    for index, (x, y) in enumerate(data, start=1):
        loss = F.mse_loss(model(x), y)
        total += loss.item()
        (loss / WINDOW).backward()
        if index % WINDOW == 0:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
            optimizer.step()
            optimizer.zero_grad()
            _, total = (total / WINDOW, norm), 0.0


def hand_written_loop(data: Data) -> None:
    """`for batch in window: window.backward(...)`, then `window.step()`."""
    model, optimizer = made()
    updater = ms.Updater(model, optimizer, clip=ms.ByGlobalNorm(1.0))
    for window in updater.windows(data, size=WINDOW):
        for x, y in window:
            window.backward(F.mse_loss(model(x), y, reduction="sum"), count=y.numel())
        window.step()


def update_loop(data: Data) -> None:
    """`updater.update(window, loss)`, counted ahead."""
    model, optimizer = made()
    updater = ms.Updater(model, optimizer, clip=ms.ByGlobalNorm(1.0))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum")

    for window in updater.windows(data, size=WINDOW, count=ms.elements()):
        updater.update(window, loss)


def microseconds(loop: Callable[[Data], None], data: Data) -> float:
    """The time of one microbatch."""
    started = time.perf_counter()
    loop(data)
    return (time.perf_counter() - started) / len(data) * 1e6


def spread(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"{statistics.median(values):.3g} ({low:.3g} to {high:.3g})"


def main() -> None:
    """Time the loops in turns and print a table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(NUM_BATCHES)]
    loops = [plain_loop, logged_loop, hand_written_loop, update_loop]
    for loop in loops:  # what is imported or set up once is not part of it
        loop(data[: 10 * WINDOW])
    times: dict[str, list[float]] = {loop.__name__: [] for loop in loops}
    for _ in range(NUM_PAIRS):
        for loop in loops:
            times[loop.__name__].append(microseconds(loop, data))
    print(f"{dt.datetime.now(tz=dt.UTC):%Y-%m-%d}, {platform.machine()}, ", end="")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python ", end="")
    print(f"{platform.python_version()}, torch {torch.__version__}, midstep {ms.__version__}")
    print(f"medians (and quartiles) of {NUM_PAIRS} turns of {NUM_BATCHES:,} microbatches\n")
    print(f"{'loop':<20}{'us a microbatch':<28}of the plain loop")
    for name, found in times.items():
        ratios = [a / b for a, b in zip(found, times["plain_loop"], strict=True)]
        print(f"{name:<20}{spread(found):<28}{spread(ratios)}")


if __name__ == "__main__":
    main()
