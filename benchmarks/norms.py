"""How accurate and how fast are ways to take the L2 norm of one large gradient, and of a model's?

    python benchmarks/norms.py

The truth is float64 over the whole tensor. "Equal" entries round all one way, which is the worst
case of a long sum; "normal" ones partly cancel. Models are transformers of few layers, but for the
largest, a GPT-2; their norm is held against `torch._foreach_norm`, which gives a tensor for each
gradient and leaves it to its caller to join and to read them.
"""

import math
import statistics
from collections.abc import Callable

import torch
from steps import gpt2_shapes
from timing import interleaved, machine, paired, ratios, spread
from torch import Tensor

from midstep.gradients import Norms, tensor_norms

NUM_ENTRIES = 20_000_000


def rows(length: int) -> Callable[[Tensor], Tensor]:
    """Norms of rows in float32, joined in float64."""

    def norm(tensor: Tensor) -> Tensor:
        parts = torch.linalg.vector_norm(tensor.view(-1, length), dim=1)
        return torch.linalg.vector_norm(parts, dtype=torch.float64)

    return norm


def in_blocks(length: int) -> Callable[[Tensor], Tensor]:
    """Half precision widened block by block, into one buffer that stays in the cache."""

    def norm(tensor: Tensor) -> Tensor:
        buffer = torch.empty(length)
        parts = []
        for block in tensor.split(length):
            wide = buffer[: len(block)].copy_(block)
            parts.append(torch.linalg.vector_norm(wide.view(-1, 256), dim=1))
        return torch.linalg.vector_norm(torch.cat(parts), dtype=torch.float64)

    return norm


WAYS: dict[str, Callable[[Tensor], Tensor | float]] = {
    "whole tensor in float32 (torch)": torch.linalg.vector_norm,
    "rows of 4,096": rows(4096),
    "rows of 1,024": rows(1024),
    "rows of 512": rows(512),
    "rows of 256": rows(256),
    "rows of 64": rows(64),
    "float64 accumulation": lambda t: torch.linalg.vector_norm(t, dtype=torch.float64),
    "midstep": lambda t: tensor_norms([t])[0],
}
HALF_WAYS: dict[str, Callable[[Tensor], Tensor | float]] = {
    "whole tensor in bfloat16 (torch)": torch.linalg.vector_norm,
    "torch, dtype=float32": lambda t: torch.linalg.vector_norm(t, dtype=torch.float32),
    "widened whole, rows of 256": lambda t: rows(256)(t.float()),
    "widened in blocks, one buffer": in_blocks(2**20),
    "midstep: widened in blocks": lambda t: tensor_norms([t])[0],
}


def compare(ways: dict[str, Callable[[Tensor], Tensor | float]], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    num_entries = NUM_ENTRIES // 4096 * 4096
    inputs = {
        "equal": torch.full((num_entries,), 0.1, dtype=dtype),
        "normal": torch.randn(num_entries).mul_(1e-3).to(dtype),
    }
    truth = {name: math.sqrt(t.double().square().sum().item()) for name, t in inputs.items()}
    times = interleaved({name: lambda w=way: w(inputs["normal"]) for name, way in ways.items()})
    print(f"\n{num_entries:,} entries, {dtype}")
    print(f"{'way':42}{'error, equal':>14}{'error, normal':>15}{'ms':>8}{'time':>8}")
    for name, way in ways.items():
        errors = [abs(float(way(t)) / truth[kind] - 1) for kind, t in inputs.items()]
        seconds, ratio = times[name]
        print(f"{name:42}{errors[0]:14.1e}{errors[1]:15.1e}{seconds * 1e3:8.1f}{ratio:7.2f}x")


def layer_shapes(width: int) -> list[tuple[int, ...]]:
    wide = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return [*wide, *[(width,)] * 4, (3 * width,), (4 * width,)]


def repeated(measure: Callable[[], object], num: int) -> Callable[[], None]:
    def several() -> None:
        for _ in range(num):
            measure()

    return several


def compare_models() -> None:
    print(
        f"\n{torch.get_num_threads()} thread(s)\n{'parameters':>12}{'us':>8}   over _foreach_norm"
    )
    for shapes in (*map(layer_shapes, (24, 88, 288, 496, 912)), gpt2_shapes()):
        grads = [torch.randn(shape).mul_(1e-3) for shape in shapes]
        num = sum(g.numel() for g in grads)
        calls = max(1, 2_000_000 // num)
        ways = {
            "torch": repeated(lambda grads=grads: torch._foreach_norm(grads), calls),
            "ours": repeated(lambda grads=grads: Norms(grads).total(), calls),
        }
        found = paired(ways, rounds=21)
        micros = statistics.median(found["ours"]) / calls * 1e6
        print(f"{num:12,}{micros:8.0f}   {spread(ratios(found['ours'], found['torch']))}")


if __name__ == "__main__":
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    print(machine())
    compare(WAYS, torch.float32)
    compare(HALF_WAYS, torch.bfloat16)
    for num in sorted({1, num_threads}):
        torch.set_num_threads(num)
        compare_models()
