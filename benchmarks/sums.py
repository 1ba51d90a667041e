"""Figures behind decision 12: how exactly the gradients of a window are summed, and what it costs.

OMP_NUM_THREADS=1 python benchmarks/sums.py
"""

import sys
from collections.abc import Callable

import torch
from timing import machine, paired, ratios, spread
from torch import Tensor, nn
from windows import peak_bytes, print_peak_of, way_of

import midstep as ms
from midstep.accumulation import Accumulation, Wide

NUM_ENTRIES = 20_000


class Float64:
    """Sums in float64, rounded to float32 once: the other way to spend 4 bytes a parameter."""

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: object) -> None:
        del optimizer, ranks
        self._parameters = list(model.parameters())

    def begin(self) -> None:
        for parameter in self._parameters:
            parameter.grad_dtype = torch.float64

    def before_backward(self, *, index: int, syncs: bool) -> None:
        """Autograd knows what to do."""

    def after_backward(self) -> None:
        """Nothing."""

    def finish(self) -> None:
        for parameter in self._parameters:
            grad, parameter.grad = parameter.grad, None
            parameter.grad_dtype = torch.float32
            parameter.grad = None if grad is None else grad.float()

    def forget(self) -> None:
        """Nothing."""


class Held(nn.Module):
    """Its gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_ENTRIES))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def half(count: int) -> dict[str, float]:
    """Error of the sum of so many bfloat16 gradients, relative to float64."""
    torch.manual_seed(0)
    grads = [(torch.randn(NUM_ENTRIES) + 0.3).bfloat16() for _ in range(count)]
    narrow, wide = torch.zeros(NUM_ENTRIES).bfloat16(), torch.zeros(NUM_ENTRIES)
    top, rest = torch.zeros(NUM_ENTRIES).bfloat16(), torch.zeros(NUM_ENTRIES).bfloat16()
    for grad in grads:
        narrow += grad
        wide += grad.float()
        total = top.float() + rest.float() + grad.float()
        top = total.bfloat16()
        rest = (total - top.float()).bfloat16()
    found = {
        "bfloat16, 2 bytes": narrow,
        "float32, 4 bytes": wide,
        "bfloat16 with its rest, 4 bytes": top.double() + rest.double(),
        "float32, rounded once": wide.bfloat16(),
        "bfloat16 with its rest, rounded once": top,
    }
    return {name: error_of(value, grads) for name, value in found.items()}


def whole(count: int, *, cancels: bool) -> dict[str, float]:
    """Error of the sum of so many float32 gradients in a window, relative to float64.

    Args:
        count: Of microbatches.
        cancels: Whether the second one is a thousand times as large, and is taken back at the end.
    """
    torch.manual_seed(0)
    grads = [torch.randn(NUM_ENTRIES) + 0.3 for _ in range(count)]
    if cancels:
        grads[1] *= 1000.0
        grads[-1] = -grads[1]
    ways: dict[str, Accumulation | None] = {
        "float32, 4 bytes": None,
        "float32 with its rest, 8 bytes": Wide(compensated=True),
        "float64, rounded once, 8 bytes": Float64(),
    }
    found = {}
    for name, accumulation in ways.items():
        model = Held()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        updater = ms.Updater(model, optimizer, accumulation=accumulation)
        # A count of 1 in all, so that the seed is 1.
        updater.update(grads, lambda m, x: m(x).sum(), count=lambda _: 1 / 1024)
        assert model.weight.grad is not None
        seed = torch.tensor(1.0 / (count / 1024))
        found[name] = error_of(model.weight.grad, [grad * seed for grad in grads])
    return found


def error_of(found: Tensor, grads: list[Tensor]) -> float:
    """Root mean square of the differences, over that of the truth."""
    truth = torch.stack([grad.double() for grad in grads]).sum(0)
    gap = found.double() - truth
    return float(gap.square().mean().sqrt() / truth.square().mean().sqrt())


WAYS: dict[str, Callable[[], Accumulation | None]] = {
    "autograd's own": lambda: None,
    "compensated": lambda: Wide(compensated=True),
    "float64": Float64,
}


def made(name: str, tokens: int = 16) -> Callable[[], None]:
    return way_of("ours", tokens=tokens, accumulation=WAYS[name]())


def small(name: str) -> Callable[[], None]:
    """Windows of four microbatches through a layer so small that only calls show."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, fused=True)
    updater = ms.Updater(model, optimizer, accumulation=WAYS[name]())
    data = [torch.randn(4, 8) for _ in range(4)]

    def run() -> None:
        for _ in range(50):
            updater.update(data, lambda m, x: m(x).square().sum(), count=ms.rows())

    return run


def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    for count in (64, 1_000):
        for name, error in half(count).items():
            print(f"bfloat16, sum of {count:5}, {name:38} {error:.1e}")
        for cancels in (False, True):
            kind = "cancelling" if cancels else "plain"
            for name, error in whole(count, cancels=cancels).items():
                print(f"float32, {kind} sum of {count:5}, {name:32} {error:.1e}")
    for tokens in (16, 256):
        times = paired({name: made(name, tokens) for name in WAYS}, rounds=15, warmup=1)
        for name in list(WAYS)[1:]:
            shown = spread(ratios(times[name], times["autograd's own"]))
            print(f"windows of 8 x {tokens:3} tokens, {name:12} / autograd's own  {shown}")
    times = paired({name: small(name) for name in WAYS}, rounds=21)
    for name in list(WAYS)[1:]:
        shown = spread(ratios(times[name], times["autograd's own"]))
        print(f"windows of 4, Linear(8, 8), {name:12} / autograd's own  {shown}")
    peaks = {name: peak_bytes(name, __file__) for name in WAYS}
    for name, peak in peaks.items():
        print(f"peak of a window, {name:16} {peak / 2**20:6.0f} MiB")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        print_peak_of(made(sys.argv[2]))
    else:
        main()
