"""How each cost grows: with parameters, with microbatches a window, and with ranks.

    OMP_NUM_THREADS=1 python benchmarks/growth.py

Writes three pictures to docs/pictures. Beside the library runs plain torch, in turns. 300M
parameters take 7 GB.
"""

import functools
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import altair as alt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from overhead import Data, made_data
from steps import FUSED, time_steps
from timing import machine, paired
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import midstep as ms
from midstep.pictures import ACCENT, MUTED, rows, save_picture

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
Point = dict[str, object]


def of_parameters() -> list[Point]:
    points: list[Point] = []
    for millions in (1, 3, 10, 30, 100, 300):
        shapes = [(1000, 1000)] * millions
        found = time_steps(shapes, rounds=3 if millions > 30 else 7, only=FUSED[:2])
        for name, key in (("midstep", "ours fp32"), ("clip_grad_norm_, AdamW", "plain fp32")):
            seconds = statistics.median(found[key])
            points.append({"x": millions, "way": name, "ms": seconds * 1e3})
    return points


def plain_loop(data: Data, size: int) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(data, start=1):
        (nn.functional.mse_loss(model(x), y) / size).backward()
        if index % size == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def our_loop(data: Data, size: int) -> None:
    model = nn.Linear(8, 8)
    updater = ms.Updater(
        model, torch.optim.SGD(model.parameters(), lr=0.01), clip=ms.ByGlobalNorm(1.0)
    )
    for window in updater.windows(data, size=size):
        for x, y in window:
            loss_sum = nn.functional.mse_loss(model(x), y, reduction="sum")
            window.backward(loss_sum, count=y.numel())
        window.step()


def of_microbatches() -> list[Point]:
    points: list[Point] = []
    data = made_data(512)
    for size in (1, 4, 16, 64, 256):
        ways = {
            "midstep": functools.partial(our_loop, data, size),
            "plain loop": functools.partial(plain_loop, data, size),
        }
        for name, seconds in paired(ways, rounds=7).items():
            each = statistics.median(seconds) / len(data)
            points.append({"x": size, "way": name, "ms": each * 1e3})
    return points


def _rank(rank: int, size: int, store: str, answers: "mp.SimpleQueue[object]") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    data = [torch.randn(16, 512) for _ in range(4)]

    def plain() -> None:
        for index, x in enumerate(data):
            model.require_backward_grad_sync = index == len(data) - 1
            (model(x).square().mean() / len(data)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def ours(updater: ms.Updater) -> Callable[[], None]:
        def run() -> None:
            for window in updater.windows(data, size=len(data), count=ms.elements()):
                updater.update(window, lambda m, x: m(x).square().sum())
                return

        return run

    updater = ms.Updater(model, optimizer, clip=ms.ByGlobalNorm(1.0))
    found = paired({"midstep": ours(updater), "plain DDP loop": plain}, rounds=15)
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def of_ranks() -> list[Point]:
    points: list[Point] = []
    context = mp.get_context("spawn")
    for size in (1, 2, 4):
        answers = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(_rank, (size, f"{folder}/store", answers), nprocs=size)
        for name, seconds in answers.get().items():
            points.append({"x": size, "way": name, "ms": statistics.median(seconds) * 1e3})
    return points


def draw(name: str, points: list[Point], x_title: str, y_title: str) -> None:
    ours, peer = "midstep", next(str(p["way"]) for p in points if p["way"] != "midstep")
    ticks = sorted({p["x"] for p in points}, key=float)
    log = alt.Scale(type="log", nice=False)
    x = alt.X("x:Q", title=x_title, scale=log, axis=alt.Axis(values=ticks, format="~s"))
    y = alt.Y("ms:Q", title=y_title, scale=alt.Scale(type="log"), axis=alt.Axis(format="~r"))
    colours = alt.Scale(domain=[ours, peer], range=[ACCENT, MUTED])
    colour = alt.Color("way:N", title=None, scale=colours, legend=alt.Legend(orient="top"))
    lines = alt.Chart(rows(points)).mark_line(point=True).encode(x, y, colour)
    heading = alt.TitleParams(f"{y_title} by {x_title}", subtitle=machine())
    FOLDER.mkdir(parents=True, exist_ok=True)
    chart = lines.properties(width=520, height=260, title=heading)
    save_picture(chart, FOLDER / f"growth-{name}.png", title=f"{y_title} by {x_title}")


def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    for name, measure, x_title, y_title in (
        ("microbatches", of_microbatches, "microbatches a window", "ms a microbatch"),
        ("ranks", of_ranks, "ranks (on two cores)", "ms an update"),
        ("parameters", of_parameters, "million parameters", "ms a step"),
    ):
        points = measure()
        for point in points:
            print(name, point)
        draw(name, points, x_title, y_title)


if __name__ == "__main__":
    main()
