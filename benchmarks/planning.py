"""Planning: who counts bytes how fast, how long a table takes, and what AutoRows costs.

python benchmarks/planning.py
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

import midstep as ms
from midstep.planning import peak_of
from midstep.planning.live import LiveBytes
from midstep.recipes.gpt import GPT, GPTConfig
from midstep.undoing import StepGuard


def gpt(width: int, depth: int, vocab_size: int) -> GPT:
    heads = max(1, width // 64)
    return GPT(GPTConfig(vocab_size=vocab_size, width=width, depth=depth, num_heads=heads))


def step(model: nn.Module, ids: torch.Tensor) -> None:
    logits = model(ids, document_ids=torch.zeros_like(ids))
    F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum").backward()


def trackers() -> None:
    """The same peak by three ways: real allocations, and two counts of fake ones."""
    torch.manual_seed(0)
    model, ids = gpt(256, 6, 256), torch.randint(256, (8, 128))
    step(model, ids)
    model.zero_grad()
    real = peak_of(lambda: step(model, ids)).num_bytes
    model.zero_grad()
    with FakeTensorMode() as mode:
        fake = gpt(256, 6, 256)
        known = [*fake.parameters(), *fake.buffers()]
        fake_ids = mode.from_tensor(ids)
        held = sum(p.nbytes for p in fake.parameters())
        for name in ("warm-up", "LiveBytes", "MemTracker"):
            fake.zero_grad()
            started = time.perf_counter()
            if name == "MemTracker":
                tracker = MemTracker()
                tracker.track_external(fake)
                with tracker:
                    step(fake, fake_ids)
                (snapshot,) = tracker.get_tracker_snapshot("peak").values()
                most = snapshot["Total"] - held
            else:
                with LiveBytes([*known, fake_ids]) as live:
                    step(fake, fake_ids)
                most = live.most
            seconds = time.perf_counter() - started
            print(f"{name:12} {most:>12,} of {real:,} bytes, {seconds:6.2f} s")


def table() -> None:
    """The whole table of a model of 400 million parameters, from nothing but its shape."""
    ids = torch.zeros(1, 1024, dtype=torch.int64)
    started = time.perf_counter(), time.process_time()
    found = ms.plan(
        lambda: gpt(1024, 28, 50304),
        {"input_ids": ids, "document_ids": ids, "labels": ids},
        lambda model, batch: ms.cross_entropy(
            model(batch["input_ids"], document_ids=batch["document_ids"]), batch["labels"]
        ),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        targets=500_000,
        count=ms.targets(key="labels"),
        budget=24 * 10**9,
    )
    wall, cpu = time.perf_counter() - started[0], time.process_time() - started[1]
    print(f"{len(found.ways)} ways in {cpu:.1f} s of one core ({wall:.1f} s passed)")
    print(found)


def auto_rows() -> None:
    """A window with AutoRows and without an error, over one with a number of rows."""

    def updater() -> tuple[ms.Updater, list[Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        batches = [(torch.randn(64, 64), torch.randint(10, (64,))) for _ in range(50)]
        return ms.Updater(model, torch.optim.AdamW(model.parameters(), fused=True)), batches

    def seconds(rows: int | ms.AutoRows) -> float:
        made, batches = updater()
        started = time.perf_counter()
        for window in made.windows(batches, rows=rows, count=ms.targets()):
            made.update(window, lambda model, b: ms.cross_entropy(model(b[0]), b[1]))
        return time.perf_counter() - started

    kinds = {"AutoRows()": ms.AutoRows(), "guards_step": ms.AutoRows(guards_step=True)}
    seconds(64)
    for name, auto in kinds.items():
        ratios = [seconds(auto) / seconds(64) for _ in range(15)]
        print(f"{name:12} {statistics.median(ratios):.2f}x a window of 64 rows in one piece")


def guards() -> None:
    """A step that can be finished, and one that is copied, over a plain one."""

    def seconds(optimizer: torch.optim.Optimizer, copies: bool | None) -> float:
        started = time.perf_counter()
        if copies is None:
            optimizer.step()
        else:
            StepGuard(copies=copies, before=lambda: None).take(optimizer)
        return time.perf_counter() - started

    kinds: dict[str, dict[str, Any]] = {"loop": {}, "foreach": {"foreach": True}}
    kinds["fused"] = {"fused": True}
    for name, settings in kinds.items():
        for number, width in ((200, 64), (20, 1024)):
            parameters = [nn.Parameter(torch.randn(width, width)) for _ in range(number)]
            optimizer = torch.optim.AdamW(parameters, **settings)
            for p in parameters:
                p.grad = torch.randn_like(p)
            rows = [[seconds(optimizer, how) for how in (None, False, True)] for _ in range(27)][2:]
            kept = statistics.median(row[1] / row[0] for row in rows)
            copied = statistics.median(row[2] / row[0] for row in rows)
            plain = statistics.median(row[0] for row in rows)
            print(
                f"{name:8} {number:4} matrices of {width}: finished {kept:.2f}x, copied "
                f"{copied:.2f}x a plain step of {1e3 * plain:.1f} ms"
            )


if __name__ == "__main__":
    trackers()
    auto_rows()
    guards()
    table()
