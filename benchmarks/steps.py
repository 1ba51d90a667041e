"""One step on the parameters of a GPT-2 of 124M: check, clip and AdamW, against the usual ways.

    python benchmarks/steps.py

What is timed is what stands between the last backward and the next window: for the library
`window.step()` with all it does, for the others what tutorials and `torch.amp` say. Gradients are
filled anew before each, so that every one of them is clipped.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator

import torch
from timing import machine, paired, ratios, spread
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import midstep as ms

WIDTH, NUM_LAYERS, VOCABULARY, CONTEXT = 768, 12, 50257, 1024
SCALE = 1024.0
# Apart, because the default AdamW makes and frees gigabytes, and slows what follows.
FUSED = ("ours fp32", "plain fp32", "ours within", "plain within", "ours fp16", "plain fp16")
FUSED = (*FUSED, "addition")
TUTORIAL = ("ours fp32 beside it", "tutorial")


def gpt2_shapes() -> list[tuple[int, ...]]:
    layer = [
        *[(WIDTH,)] * 4,
        *((3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)),
        *((4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,)),
    ]
    return [(VOCABULARY, WIDTH), (CONTEXT, WIDTH), *layer * NUM_LAYERS, (WIDTH,), (WIDTH,)]


class Bench(nn.Module):
    """Parameters of given shapes, whose gradients are made by hand."""

    def __init__(self, shapes: list[tuple[int, ...]], device: str) -> None:
        super().__init__()
        self.all = nn.ParameterList(
            nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes
        )
        self.grads = [torch.empty_like(p) for p in self.all]

    @property
    def num(self) -> int:
        return sum(p.numel() for p in self.all)

    @torch.no_grad()
    def fill(self, scale: float = 1.0) -> None:
        """Gradients of norm sqrt(num) or so, times a loss scale; of equal size in every entry."""
        for grad in self.grads:
            grad.fill_(0.02 * scale)
        self.grads[0].mul_(1.5)
        for p, grad in zip(self.all, self.grads, strict=True):
            p.grad = grad


@dataclasses.dataclass
class Ours:
    """An updater whose windows get the gradients of a bench instead of a backward's."""

    bench: Bench
    updater: ms.Updater
    scale: float = 1.0

    def open(self) -> None:
        self._windows: Iterator[ms.Window[Tensor]] = self.updater.windows(
            [torch.ones(1)], size=1, count=ms.rows()
        )
        self._window = next(self._windows)
        for _ in self._window:
            with self._window.forward():
                loss_sum = self.bench.all[-1].sum()
            self._window.backward(loss_sum)
        self.bench.fill(self.scale)

    def step(self) -> None:
        self._window.step()


def plain_ways(bench: Bench, optimizer: torch.optim.Optimizer) -> dict[str, Callable[[], None]]:
    default = torch.optim.AdamW(bench.all)
    scaler = torch.amp.GradScaler(bench.all[0].device.type, init_scale=SCALE)
    scaler.scale(torch.ones((), device=bench.all[0].device))

    def fused() -> None:
        clip_grad_norm_(bench.all, 1.0)
        optimizer.step()

    def within() -> None:
        clip_grad_norm_(bench.all, 1e9)  # multiplies by 1
        optimizer.step()

    def scaled() -> None:
        scaler.unscale_(optimizer)
        clip_grad_norm_(bench.all, 1.0)
        scaler.step(optimizer)
        scaler.update()

    def tutorial() -> None:
        for p in bench.all:
            if not torch.isfinite(p.grad).all():
                raise FloatingPointError
        clip_grad_norm_(bench.all, 1.0)
        default.step()

    return {"fp32": fused, "within": within, "fp16": scaled, "tutorial": tutorial}


def time_steps(
    shapes: list[tuple[int, ...]],
    *,
    rounds: int,
    device: str = "cpu",
    only: Collection[str] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each round: ours, the ways it is held against, and an in-place addition.

    Args:
        shapes: Of the parameters.
        rounds: How often each is timed.
        device: Where.
        only: Names of the ways; None for all of them.
    """
    bench = Bench(shapes, device)
    optimizer = torch.optim.AdamW(bench.all, lr=1e-9, fused=True)
    clip = ms.ByGlobalNorm(1.0)
    full = Ours(bench, ms.Updater(bench, optimizer, clip=clip))
    loose = Ours(bench, ms.Updater(bench, optimizer, clip=ms.ByGlobalNorm(1e9)))
    precision = ms.FP16(init_scale=SCALE, growth_interval=10**9)
    half = Ours(bench, ms.Updater(bench, optimizer, clip=clip, precision=precision), SCALE)
    plain = plain_ways(bench, optimizer)
    # Larger than any cache; read two, write one.
    a, b = (torch.zeros(bench.num // 2 + 1, device=device) for _ in range(2))
    ways: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "ours fp32": (full.open, full.step),
        "plain fp32": (bench.fill, plain["fp32"]),
        "ours within": (loose.open, loose.step),
        "plain within": (bench.fill, plain["within"]),
        "addition": (lambda: None, lambda: a.add_(b)),
        "ours fp32 beside it": (full.open, full.step),
        "ours fp16": (half.open, half.step),
        "plain fp16": (lambda: bench.fill(SCALE), plain["fp16"]),
    }
    ways["tutorial"] = (bench.fill, plain["tutorial"])
    ways = {name: way for name, way in ways.items() if only is None or name in only}
    ready = torch.cuda.synchronize if device == "cuda" else lambda: None
    prepare = {name: first for name, (first, _) in ways.items()}
    steps = {name: way for name, (_, way) in ways.items()}
    found = paired(steps, rounds=rounds, warmup=1, prepare=prepare, ready=ready)
    found["bytes of the addition"] = [12.0 * a.numel()]
    found["bytes of the step"] = [32.0 * bench.num]
    return found


def bandwidth_shares(found: dict[str, list[float]]) -> list[float]:
    """32 bytes a parameter over the time of a step, over what an addition reaches."""
    (moved,), (added,) = found["bytes of the step"], found["bytes of the addition"]
    steps, additions = found["ours fp32"], found["addition"]
    return [moved / s / (added / a) for s, a in zip(steps, additions, strict=True)]


def norm_errors(shapes: list[tuple[int, ...]]) -> tuple[float, float]:
    """How far our norm of normal gradients, and torch's, are from that of float64."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.empty(shape)) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn(p.shape).mul_(0.01)
    truth = math.sqrt(math.fsum(p.grad.double().square().sum().item() for p in parameters))
    ours = float(ms.total_norm([p.grad for p in parameters]))
    torchs = torch.nn.utils.get_total_norm([p.grad for p in parameters]).item()
    return abs(ours / truth - 1), abs(torchs / truth - 1)


def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    for device in ("cpu", "cuda"):
        if device == "cuda" and not torch.cuda.is_available():
            print("\nno GPU found, so its half of the table was not measured")
            continue
        found = time_steps(gpt2_shapes(), rounds=7, device=device, only=FUSED)
        found |= time_steps(gpt2_shapes(), rounds=7, device=device, only=TUTORIAL)
        print(f"\n{device}")
        for ours, peer in (
            ("ours fp32", "plain fp32"),
            ("ours within", "plain within"),
            ("ours fp16", "plain fp16"),
            ("ours fp32 beside it", "tutorial"),
        ):
            print(f"{ours} / {peer:12} {spread(ratios(found[ours], found[peer]))}")
        print(f"share of the bandwidth   {spread(bandwidth_shares(found))}")
    print("error of the norm: ours {:.1e}, torch {:.1e}".format(*norm_errors(gpt2_shapes())))


if __name__ == "__main__":
    main()
