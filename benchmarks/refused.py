"""Figures behind decisions 13 and 14: what was tried to make updates cheaper, mostly refused.

OMP_NUM_THREADS=1 python benchmarks/refused.py
"""

import itertools
import statistics

import torch
from timing import machine, paired, ratios, spread
from torch import Tensor, nn
from windows import made

import midstep as ms
from midstep.gradients import tensor_norms


def hot_norm(num_entries: int) -> list[float]:
    """The norm of a gradient just written, over that of one the cache has forgotten."""
    grad, source = torch.empty(num_entries), torch.randn(num_entries)
    others = torch.zeros(60_000_000)
    found: dict[bool, list[float]] = {True: [], False: []}
    for is_hot in (True, False):

        def before(is_hot: bool = is_hot) -> None:
            grad.copy_(source)
            if not is_hot:
                others.add_(1.0)

        way = {"norm": lambda: tensor_norms([grad])}
        found[is_hot] = paired(way, rounds=9, prepare={"norm": before})["norm"]
    return ratios(found[True], found[False])


def previous_norm() -> tuple[float, float, float]:
    """Clipping by the norm of the update before: how far off is the coefficient?"""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    updater = ms.Updater(model, optimizer, clip=ms.ByGlobalNorm(0.5))

    def loss(model: nn.Module, rows: Tensor) -> ms.LossSum:
        return ms.cross_entropy(model(x[rows]), y[rows])

    order = [rows for _ in range(6) for rows in torch.randperm(len(x)).split(32)]
    norms = [updater.update([rows], loss).grad_norm or 0.0 for rows in order]
    pairs = [(min(1.0, 0.5 / a), min(1.0, 0.5 / b), b) for a, b in itertools.pairwise(norms)]
    errors = sorted(abs(used / own - 1) for used, own, _ in pairs if min(used, own) < 1)
    over = max(used * norm / 0.5 for used, _, norm in pairs)
    return statistics.median(errors), errors[int(0.95 * len(errors))], over


def convolution_shares() -> dict[str, list[float]]:
    """What an addition of the weight's gradient takes of forward and backward of a convolution."""
    found = {}
    for channels, width, rows in ((64, 32, 8), (256, 8, 8), (512, 4, 8), (512, 4, 1)):
        layer = nn.Conv2d(channels, channels, 3, padding=1)
        x = torch.randn(rows, channels, width, width, requires_grad=True)
        layer(x).sum().backward()
        addend = layer.weight.detach().clone()
        ways = {
            "addition": lambda layer=layer, a=addend: layer.weight.grad.add_(a),
            "both": lambda layer=layer, x=x: layer(x).sum().backward(),
        }
        times = paired(ways, rounds=9)
        name = f"{channels} channels of {width} x {width}, {rows} rows"
        found[name] = ratios(times["addition"], times["both"])
    return found


def joined_products() -> dict[str, list[float]]:
    """One window's weight gradients of 8 x 16 tokens: 8 products, or one of all tokens."""
    model, _ = made()
    weight = model[0].weight
    grad = torch.zeros_like(weight)
    rows = [torch.randn(16, weight.shape[0]) for _ in range(8)]
    inputs = [torch.randn(16, weight.shape[1]) for _ in range(8)]

    def each() -> None:
        for a, b in zip(rows, inputs, strict=True):
            grad.addmm_(a.t(), b)

    ways = {"each": each, "joined": lambda: grad.addmm_(torch.cat(rows).t(), torch.cat(inputs))}
    with torch.no_grad():
        return paired(ways, rounds=9)


def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    for num_entries in (2**18, 2_359_296, 38_597_376):
        print(f"norm of {num_entries:10,} while hot / cold  {spread(hot_norm(num_entries))}")
    print(
        "clipped by the previous norm: median {:.2f}, 95 % {:.2f}, most {:.1f} x".format(
            *previous_norm()
        )
    )
    for name, share in convolution_shares().items():
        print(f"addition of a convolution's weight gradient, {name:32} {spread(share)}")
    times = joined_products()
    joined = spread(ratios(times["joined"], times["each"]))
    print(f"weight gradient of 8 x 16 tokens, joined / each  {joined}")


if __name__ == "__main__":
    main()
