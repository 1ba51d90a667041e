"""Clip, then step, against one factor that a fused optimizer takes: time and rounding.

    python benchmarks/fold.py

AdamW of 10M parameters; the factor is a division, a loss scale or a clip coefficient, or all of
them. "Rounding" is the largest difference of an update from that of float64, over the largest
update.
"""

from collections.abc import Callable

import torch
from timing import interleaved, machine
from torch import Tensor

SHAPE, NUM_TENSORS, FACTOR = (1000, 1000), 10, 0.123456789


def parameters(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    found = []
    for _ in range(NUM_TENSORS):
        p = torch.zeros(SHAPE, dtype=dtype, requires_grad=True)
        p.grad = torch.randn(SHAPE, dtype=torch.float64).mul_(1e-3).to(dtype)
        found.append(p)
    return found


def optimizer_of(params: list[Tensor], *, fused: bool) -> torch.optim.Optimizer:
    # An epsilon of the size of the gradient, or Adam would divide the factor out again.
    return torch.optim.AdamW(params, lr=1.0, eps=1e-3, fused=fused, foreach=not fused)


def multiplied(params: list[Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        with torch.no_grad():
            torch._foreach_mul_([p.grad for p in params if p.grad is not None], FACTOR)
        optimizer.step()

    return step


def folded(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.grad_scale = torch.tensor(1.0 / FACTOR, dtype=torch.float32)
        optimizer.step()
        del optimizer.grad_scale

    return step


def steps(dtype: torch.dtype) -> dict[str, tuple[list[Tensor], Callable[[], None]]]:
    plain, fused, in_kernel = (parameters(dtype) for _ in range(3))
    return {
        "multiply, then foreach step": (
            plain,
            multiplied(plain, optimizer_of(plain, fused=False)),
        ),
        "multiply, then fused step": (fused, multiplied(fused, optimizer_of(fused, fused=True))),
        "fused step takes the factor": (in_kernel, folded(optimizer_of(in_kernel, fused=True))),
    }


def rounding(dtype: torch.dtype) -> dict[str, float]:
    truth, step = steps(torch.float64)["multiply, then foreach step"]
    step()
    largest = max(p.abs().max().item() for p in truth)
    found = {}
    for name, (params, step) in steps(dtype).items():
        step()
        gaps = [(p.double() - t).abs().max().item() for p, t in zip(params, truth, strict=True)]
        found[name] = max(gaps) / largest
    return found


def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    for dtype in (torch.float32, torch.float64):
        gaps = rounding(dtype)
        times = interleaved({name: step for name, (_, step) in steps(dtype).items()}, rounds=31)
        print(f"\n{dtype}")
        for name, (seconds, ratio) in times.items():
            print(f"{name:30}{seconds * 1e3:7.1f} ms{ratio:7.2f}x   rounding {gaps[name]:.0e}")


if __name__ == "__main__":
    main()
