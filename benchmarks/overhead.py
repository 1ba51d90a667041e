"""What midstep costs beside the plain loop, where it could show: a model that takes no time.

Run by hand, on a quiet machine:

    OMP_NUM_THREADS=1 python benchmarks/overhead.py

A Linear(8, 8) on 8 rows, SGD, clipped to norm 1, windows of 4: nearly all of the time is Python.
On a model that computes for longer than it is asked, the ratios go to 1. The loops take turns, so
that a slow moment of the machine meets all of them; a ratio is taken within each turn.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import machine, paired, ratios, spread
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


LOOPS: dict[str, Callable[[Data], None]] = {
    "plain loop": plain_loop,
    "plain loop that logs": logged_loop,
    "window.backward": hand_written_loop,
    "updater.update": update_loop,
}


def made_data(num_batches: int = NUM_BATCHES) -> Data:
    torch.manual_seed(0)
    return [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(num_batches)]


def main() -> None:
    """Time the loops in turns and print a table."""
    torch.set_num_threads(1)
    data = made_data()
    ways = {name: lambda loop=loop: loop(data) for name, loop in LOOPS.items()}
    times = paired(ways, rounds=NUM_PAIRS, warmup=1)
    print(machine())
    print(f"medians (and quartiles) of {NUM_PAIRS} turns of {NUM_BATCHES:,} microbatches\n")
    print(f"{'loop':<22}{'us a microbatch':<28}of the plain loop")
    for name, found in times.items():
        each = [seconds / len(data) * 1e6 for seconds in found]
        print(f"{name:<22}{spread(each):<28}{spread(ratios(found, times['plain loop']))}")


if __name__ == "__main__":
    main()
