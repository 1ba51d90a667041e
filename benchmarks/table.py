"""The table: what midstep costs beside plain torch and its peers, in interleaved pairs.

    OMP_NUM_THREADS=1 python benchmarks/table.py

Prints the table and writes it to docs/benchmarks.md. Takes some minutes and 4 GB. Peers are
measured where they are installed: `pip install -c constraints.txt -e '.[peers]'`. Where a GPU is
found the same steps and windows are measured there, too.
"""

import multiprocessing
import os
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from overhead import LOOPS, Data, made_data
from peers import installed
from steps import FUSED, TUTORIAL, bandwidth_shares, gpt2_shapes, norm_errors, time_steps
from timing import machine, paired, ratios, spread
from torch.utils._python_dispatch import TorchDispatchMode
from windows import WAYS, peak_bytes, time_windows

import midstep as ms
from midstep.gradients import Norms

ROUNDS, STEP_ROUNDS, WINDOW_ROUNDS = 21, 31, 21
Found = TypeVar("Found")
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


class Row(NamedTuple):
    """One line of the table."""

    work: str
    peer: str
    found: str
    mark: str
    is_reached: bool | None


def row(work: str, peer: str, values: Sequence[float], mark: float | None) -> Row:
    median = statistics.median(values)
    if mark is None:
        return Row(work, peer, spread(values), "", None)
    return Row(work, peer, spread(values), f"<= {mark:.2f}", median <= mark)


def timed_loops(loops: Mapping[str, Callable[[Data], None]]) -> dict[str, list[float]]:
    data = made_data(400)
    ways = {name: lambda loop=loop: loop(data) for name, loop in loops.items()}
    return paired(ways, rounds=ROUNDS, warmup=1)


def overhead_rows() -> list[Row]:
    times = timed_loops(LOOPS)
    return [
        row(f"overhead, `{door}`", "plain loop", ratios(times[door], times["plain loop"]), 0.85)
        for door in ("window.backward", "updater.update")
    ]


def peer_rows() -> list[Row]:
    peers = installed()
    times = timed_loops({"updater.update": LOOPS["updater.update"], **peers})
    ours = times["updater.update"]
    return [row("overhead, `updater.update`", p, ratios(ours, times[p]), 1.0) for p in peers]


def step_rows(device: str) -> list[Row]:
    found = time_steps(gpt2_shapes(), rounds=STEP_ROUNDS, device=device, only=FUSED)
    where = "" if device == "cpu" else f"{device}: "
    pairs = (
        ("step of 124M, clipped", "`clip_grad_norm_`, fused AdamW", "fp32", "plain fp32", 0.88),
        ("step of 124M, within the bound", "the same", "within", "plain within", None),
        ("step of 124M, fp16", "`GradScaler`, clip, fused AdamW", "fp16", "plain fp16", 0.75),
    )
    rows = [
        row(where + work, peer, ratios(found[f"ours {ours}"], found[theirs]), mark)
        for work, peer, ours, theirs, mark in pairs
    ]
    share = bandwidth_shares(found)
    is_reached = statistics.median(share) >= 0.85
    work = f"{where}32 bytes a parameter over the clipped step"
    return [*rows, Row(work, "an in-place addition", spread(share), ">= 0.85", is_reached)]


def tutorial_rows(device: str) -> list[Row]:
    found = time_steps(gpt2_shapes(), rounds=ROUNDS, device=device, only=TUTORIAL)
    work = ("" if device == "cpu" else f"{device}: ") + "step of 124M, clipped"
    ratio = ratios(*(found[way] for way in TUTORIAL))
    return [row(work, "isfinite each, clip, default AdamW", ratio, 0.12)]


def window_rows(device: str) -> list[Row]:
    where = "" if device == "cpu" else f"{device}: "
    rows = []
    for tokens, mark in ((16, 0.80), (64, None)):
        found = time_windows(tokens=tokens, rounds=WINDOW_ROUNDS, device=device)
        for name in WAYS[1:]:
            # The mark is that of fused accumulation.
            own = mark if "fused" in name else None
            work = f"{where}window of {tokens}-token microbatches, {name}"
            rows.append(row(work, "plain loop", ratios(found[name], found["plain"]), own))
    return rows


def memory_rows() -> list[Row]:
    if not Path("/proc/self/clear_refs").exists():
        return [Row("peak memory of a window", "plain loop", "Linux only", "<= 1.00", None)]
    # What the allocator happens to hold comes on top or not, up to a tenth.
    rounds = [{name: peak_bytes(name) for name in WAYS} for _ in range(7)]
    peaks = {name: statistics.median(found[name] for found in rounds) for name in WAYS}
    rows = []
    for name in WAYS[1:]:
        share = peaks[name] / peaks["plain"]
        found = f"{share:.2f} ({peaks[name] / 2**20:.0f} of {peaks['plain'] / 2**20:.0f} MiB)"
        # Pages of the process itself move the peak by a percent.
        rows.append(
            Row(f"peak memory of a window, {name}", "plain loop", found, "<= 1.00", share <= 1.01)
        )
    return rows


def norm_row() -> Row:
    ours, theirs = norm_errors(gpt2_shapes())
    found = f"{ours:.1e} (torch: {theirs:.1e})"
    return Row("error of the norm, 124M float32", "float64", found, "<= 1e-7", ours <= 1e-7)


def norm_time_rows() -> list[Row]:
    grads = [torch.randn(shape).mul_(1e-3) for shape in gpt2_shapes()]
    ways = {
        "torch": lambda: torch._foreach_norm(grads),
        "ours": lambda: Norms(grads).total(),
    }
    rows = []
    for num in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(num)
        found = paired(ways, rounds=ROUNDS)
        work = f"norm of 124M float32, {num} thread" + "s" * (num > 1)
        rows.append(row(work, "`torch._foreach_norm`", ratios(found["ours"], found["torch"]), 1.0))
    return rows


class _Reads(TorchDispatchMode):
    """Counts what makes the host wait for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "item", "is_nonzero", "nonzero"):
            self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def sync_row() -> Row:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    updater = ms.Updater(model, optimizer, clip=ms.ByGlobalNorm(1.0), lazy=True)
    data = [torch.randn(8, 8) for _ in range(4)]
    with _Reads() as reads:
        for _ in range(3):
            updater.update(data, lambda m, x: m(x).square().sum(), count=ms.rows())
    number = reads.found.total()
    return Row("host syncs, applied update, nothing read, lazy", "-", str(number), "0", not number)


def measured_apart(measure: Callable[..., Found], *args: str) -> Found:
    """Measure in a process of its own: what others freed and imported would be in the figures."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, torch.set_num_threads, (1,)) as pool:
        return pool.submit(measure, *args).result()


def written(rows: Sequence[Row]) -> str:
    words = {True: "reached", False: "**not reached**", None: ""}
    lines = ["| work | peer | median (quartiles) | mark | |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {r.work} | {r.peer} | {r.found} | {r.mark} | {words[r.is_reached]} |" for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    has_gpu = torch.cuda.is_available()
    rows = [*memory_rows(), sync_row(), measured_apart(norm_row)]
    rows += measured_apart(norm_time_rows)
    rows += [*measured_apart(overhead_rows), *measured_apart(peer_rows)]
    for device in ("cpu", "cuda") if has_gpu else ("cpu",):
        for measure in (step_rows, tutorial_rows, window_rows):
            rows += measured_apart(measure, device)
    if not has_gpu:
        rows.append(Row("the same on a GPU", "-", "none was found", "", None))
    table = written(rows)
    print(f"{machine()}\n\n{table}")
    before, start, rest = PAGE.read_text(encoding="utf-8").partition("<!-- table -->\n")
    _, end, after = rest.partition("<!-- end of table -->\n")
    rounds = f"{ROUNDS} interleaved rounds ({STEP_ROUNDS} of steps, {WINDOW_ROUNDS} of windows)"
    load = f"{machine()}; {rounds}."
    PAGE.write_text(f"{before}{start}\n{load}\n\n{table}\n\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
