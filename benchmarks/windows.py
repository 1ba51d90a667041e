"""Whole windows of small microbatches, with fused accumulation and without: time and peak memory.

    python benchmarks/windows.py

Four pairs of layers 768-3072-768, windows of 8 microbatches of 16 tokens, clipped to norm 1, fused
SGD. The peak is that of a process of its own, above what it holds before the first window.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from timing import machine, paired, ratios, spread
from torch import Tensor, nn

import midstep as ms
from midstep.accumulation import Accumulation, Fused

WINDOW = 8
WAYS = ("plain", "ours", "ours, fused accumulation")


def made(device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(768, 3072), nn.ReLU(), nn.Linear(3072, 768)]
    model = nn.Sequential(*layers).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6, fused=True)


def way_of(
    name: str,
    *,
    tokens: int = 16,
    size: int = WINDOW,
    device: str = "cpu",
    accumulation: Accumulation | None = None,
) -> Callable[[], None]:
    """A function that runs one window."""
    model, optimizer = made(device)
    data = [torch.randn(tokens, 768, device=device) for _ in range(size)]
    if name == "plain":

        def plain() -> None:
            for x in data:
                (model(x).square().mean() / size).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return plain
    accumulation = Fused() if "fused" in name else accumulation
    updater = ms.Updater(model, optimizer, clip=ms.ByGlobalNorm(1.0), accumulation=accumulation)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum()

    def ours() -> None:
        updater.update(data, loss, count=ms.elements())

    return ours


def time_windows(*, tokens: int, rounds: int, device: str = "cpu") -> dict[str, list[float]]:
    ready = torch.cuda.synchronize if device == "cuda" else lambda: None
    ways = {name: way_of(name, tokens=tokens, device=device) for name in WAYS}
    return paired(ways, rounds=rounds, warmup=1, ready=ready)


def peak_bytes(name: str, script: str = __file__) -> int:
    """The highest resident memory of a fresh process that runs three windows, above its start.

    The least of three: what the allocator holds back moves it by a tenth.
    """
    run = [sys.executable, str(Path(script)), "--peak", name]
    runs = [subprocess.run(run, check=True, capture_output=True, text=True) for _ in range(3)]
    return min(int(done.stdout) for done in runs)


def resident_bytes(kind: str) -> int:
    """What Linux says of this process: `VmRSS` now, `VmHWM` at most.

    Not `ru_maxrss`, which begins with that of the process that started this one.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {kind}")


def print_peak(name: str) -> None:
    print_peak_of(way_of(name))


def print_peak_of(way: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    small = nn.Linear(2, 2)  # what is imported on first use is no memory of a window
    ms.Updater(small, torch.optim.SGD(small.parameters(), fused=True)).update(
        [torch.ones(1, 2)], lambda m, x: m(x).sum(), count=ms.elements()
    )
    nn.utils.clip_grad_norm_(small.parameters(), 1.0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the peak so far
    before = resident_bytes("VmRSS")
    for _ in range(3):
        way()
    print(resident_bytes("VmHWM") - before)


def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    for device in ("cpu", "cuda"):
        if device == "cuda" and not torch.cuda.is_available():
            print("no GPU found, so its half was not measured")
            continue
        for tokens in (16, 64):
            found = time_windows(tokens=tokens, rounds=7, device=device)
            for name in WAYS[1:]:
                shown = spread(ratios(found[name], found["plain"]))
                print(f"{device}, {tokens:3} tokens, {name:26} {shown}")
    peaks = {name: peak_bytes(name) for name in WAYS}
    for name, peak in peaks.items():
        print(f"peak of {name:26} {peak / 2**20:6.0f} MiB, {peak / peaks['plain']:.2f} of plain")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        print_peak(sys.argv[2])
    else:
        main()
