"""What does it cost to divide and scale a loss, against a seed for its backward?

    python benchmarks/seed.py

One window of 8 microbatches of a small model, forward and backward only, in float32. The last way
is not timed by itself: it is what the first becomes with a loss scale.
"""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import interleaved, machine
from torch import Tensor, nn

NUM_MICROBATCHES, SCALE = 8, 65536.0


def make_window(width: int) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    batches = [
        (torch.randn(16, width), torch.randint(0, 10, (16,))) for _ in range(NUM_MICROBATCHES)
    ]
    return model, batches


def ways(width: int) -> dict[str, Callable[[], list[Tensor]]]:
    model, batches = make_window(width)

    def window(backward: Callable[[Tensor], None], reduction: str) -> list[Tensor]:
        for p in model.parameters():
            p.grad = None
        for x, y in batches:
            backward(F.cross_entropy(model(x), y, reduction=reduction))
        return [p.grad for p in model.parameters() if p.grad is not None]

    seed = torch.tensor(1.0 / (16 * NUM_MICROBATCHES))
    return {
        "(loss / k).backward()": lambda: window(
            lambda loss: (loss / NUM_MICROBATCHES).backward(), "mean"
        ),
        "loss_sum.backward(seed)": lambda: window(lambda loss: loss.backward(seed), "sum"),
        "(loss / k * scale).backward()": lambda: window(
            lambda loss: (loss / NUM_MICROBATCHES * SCALE).backward(), "mean"
        ),
    }


def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    for width in (32, 256):
        found = ways(width)
        usual = copy.deepcopy(found["(loss / k).backward()"]())
        seeded = found["loss_sum.backward(seed)"]()
        gap = max((a - b).abs().max().item() for a, b in zip(usual, seeded, strict=True))
        print(f"\nwidth {width}, the same gradient to {gap:.0e}")
        for name, (seconds, ratio) in interleaved(found, rounds=301, warmup=20).items():
            print(f"{name:32}{seconds * 1e6:8.0f} us{ratio:7.2f}x")


if __name__ == "__main__":
    main()
