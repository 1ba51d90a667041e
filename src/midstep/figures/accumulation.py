"""F1 to F4, F10, F11 and F17: what accumulation adds up to."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from ..clip.norm import ByGlobalNorm
from ..counts import elements, targets
from ..errors import EmptyWindow
from ..losses import LossSum, cross_entropy
from ..updater import Updater
from .figure import Compute, Figure, close

__all__ = ["FIGURES", "gap", "gradient_of", "regression_rows", "regressor", "squared_error"]

Pair = tuple[Tensor, Tensor]


def regressor() -> nn.Sequential:
    """Make the model of F1: Linear 8-32, ReLU, Linear 32-1, after seed 0."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def regression_rows(factor: float = 1.0) -> Pair:
    """Make its 64 rows, after seed 1; the target is their sum times a factor.

    Args:
        factor: Of the target.
    """
    torch.manual_seed(1)
    x = torch.randn(64, 8)
    return x, x.sum(dim=1, keepdim=True) * factor


def squared_error(model: nn.Module, batch: Pair) -> LossSum:
    """Sum the squared errors of a batch.

    Args:
        model: Which predicts.
        batch: Rows and targets.
    """
    total = F.mse_loss(model(batch[0]), batch[1], reduction="sum")
    return LossSum(total, batch[1].numel())


def gradient_of(model: nn.Module) -> list[Tensor]:
    """Copy the gradients of a model.

    Args:
        model: After a backward.
    """
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def gap(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Give the largest difference of an entry.

    Args:
        ours: Tensors.
        theirs: As many, of the same shapes.
    """
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def _cut(batch: Pair, sizes: Sequence[int]) -> list[Pair]:
    x, y = (torch.split(part, list(sizes)) for part in batch)
    return list(zip(x, y, strict=True))


def _accumulated(sizes: Sequence[int]) -> list[Tensor]:
    """The library's gradient of a window cut so."""
    model = regressor()
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.0))
    updater.update(_cut(regression_rows(), sizes), squared_error, count=elements())
    return gradient_of(model)


def _full() -> list[Tensor]:
    model = regressor()
    x, y = regression_rows()
    torch.autograd.backward(F.mse_loss(model(x), y))
    return gradient_of(model)


def _means(sizes: Sequence[int], divisor: float) -> list[Tensor]:
    """The loop of the documents that goes wrong: each mean loss divided by one number."""
    model = regressor()
    for x, y in _cut(regression_rows(), sizes):
        torch.autograd.backward(F.mse_loss(model(x), y) / divisor)
    return gradient_of(model)


def _f1() -> Figure:
    found = gap(_accumulated([16] * 4), _full())
    return Figure(
        id="F1",
        setup="full batch of 64 against 4 x 16",
        published={"gap": 2.384e-07},
        computed={"gap": found},
        # The last bit or two of the largest entries, whichever way the kernels sum.
        agrees=found <= 4 * 2.384e-07,
        note="the window divides once, by the rows of all microbatches",
    )


def _f2() -> Figure:
    full, undivided = _full(), _means([16] * 4, 1.0)
    found = gap(undivided, full)
    ratio = _norm(undivided) / _norm(full)
    ours = _norm(_accumulated([16] * 4)) / _norm(full)
    return Figure(
        id="F2",
        setup="the same, not divided",
        published={"gap": 4.8079, "norm_ratio": 4.0},
        computed={"gap": found, "norm_ratio": ratio, "norm_ratio_of_the_window": ours},
        agrees=close(found, 4.8079, within=5e-4)
        and close(ratio, 4.0, within=1e-5)
        and close(ours, 1.0, within=1e-6),
        note="nobody divides a loss here, so nobody can forget to",
    )


def _f3() -> Figure:
    full = _full()
    wrong, right = gap(_means([24, 24, 16], 3.0), full), gap(_accumulated([24, 24, 16]), full)
    return Figure(
        id="F3",
        setup="24 + 24 + 16 rows, each mean divided by 3; by their share",
        published={"divided_by_3": 0.20217, "by_share": 2.384e-07},
        computed={"divided_by_3": wrong, "by_share": right},
        agrees=close(wrong, 0.20217, within=5e-5) and right <= 4 * 2.384e-07,
        note="the window's own is the share",
    )


def _f4() -> Figure:
    x, _ = regression_rows()
    whole, pieces = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    for norm, rows in ((whole, 64), (pieces, 16)):
        updater = Updater(norm, torch.optim.SGD(norm.parameters(), lr=0.0))
        for window in updater.windows([(x,)], rows=rows, count=elements()):
            updater.update(window, lambda model, batch: model(batch[0]).square().sum())
    found = gap([_buffer(whole, "running_mean")], [_buffer(pieces, "running_mean")])
    tracked = [int(_buffer(norm, "num_batches_tracked")) for norm in (whole, pieces)]
    return Figure(
        id="F4",
        setup="BatchNorm1d(8): 64 rows at once against 4 x 16",
        published={"running_means_apart": 0.048792, "batches_tracked": [1, 4]},
        computed={"running_means_apart": found, "batches_tracked": tracked},
        agrees=close(found, 0.048792, within=1e-4) and tracked == [1, 4],
        note="equality ends here, and the documentation says so",
    )


def _f10() -> Figure:
    torch.manual_seed(24)
    x = torch.randn(7, 4, dtype=torch.float64)
    y = torch.tensor([0, 1, -100, 2, 0, -100, 1])
    base = nn.Linear(4, 3).double()
    ours, full, wrong = (copy.deepcopy(base) for _ in range(3))
    pieces = _cut((x, y), [2, 3, 2])
    torch.autograd.backward(F.cross_entropy(full(x), y))
    for piece in pieces:
        torch.autograd.backward(F.cross_entropy(wrong(piece[0]), piece[1]) / 3)
    true, means = gradient_of(full), gradient_of(wrong)
    still = Updater(ours, torch.optim.SGD(ours.parameters(), lr=0.0))
    still.update(pieces, _classify, count=targets())
    gradient_gap = gap(gradient_of(ours), true)
    updater = Updater(ours, _adamw(ours), clip=ByGlobalNorm(0.5))
    updater.update(pieces, _classify, count=targets())
    # Beside it the plain loop on all rows, clipped as the formula says.
    norm = _norm(true)
    for p, g in zip(full.parameters(), true, strict=True):
        p.grad = g * min(1.0, 0.5 / norm)
    _adamw(full).step()
    weight_gap = gap(
        [p.detach() for p in ours.parameters()], [p.detach() for p in full.parameters()]
    )
    control = gap(means, true)
    return Figure(
        id="F10",
        setup="7 rows, 2 masked, cut 2 + 3 + 2: gradient, then clip 0.5 and AdamW",
        published={"gradient_gap_below": 1e-12, "weight_gap_below": 1e-12, "control_above": 1e-6},
        computed={"gradient_gap": gradient_gap, "weight_gap": weight_gap, "control": control},
        agrees=gradient_gap < 1e-12 and weight_gap < 1e-12 and control > 1e-6,
        note="the control is the mean of means",
    )


def _f11() -> Figure:
    torch.manual_seed(9)
    base = nn.Linear(4, 3).double()
    batches = [
        (torch.randn(n, 4, dtype=torch.float64), torch.arange(n) % 3) for n in (3, 2, 4, 1, 2)
    ]
    joined = [_join(batches[:3]), _join(batches[3:])]
    (ours, records), (theirs, _) = _trained(base, batches, 3), _trained(base, joined, 1)
    weight_gap = gap(
        [p.detach() for p in ours.parameters()], [p.detach() for p in theirs.parameters()]
    )
    masked = [(torch.ones(2, 4, dtype=torch.float64), torch.full((2,), -100))]
    before = [weight.clone() for weight in _weights(ours)]
    try:
        _trained(ours, masked, 1, copies=False)
        refused = False
    except EmptyWindow:
        refused = gap(before, _weights(ours)) == 0.0
    computed: dict[str, Any] = {
        "microbatches": [record.num_microbatches for record in records],
        "targets": [record.denominators["loss"] for record in records],
        "rates": [record.lr[0] for record in records],
        "weight_gap": weight_gap,
        "empty_window_refused": refused,
    }
    return Figure(
        id="F11",
        setup="batches of 3, 2, 4, 1, 2 rows in windows of 3, StepLR(1, 0.9)",
        published={
            "microbatches": [3, 2],
            "targets": [9, 3],
            "rates": [0.1, 0.09],
            "weight_gap_below": 1e-12,
            "empty_window_refused": True,
        },
        computed=computed,
        agrees=computed["microbatches"] == [3, 2]
        and computed["targets"] == [9, 3]
        and gap([torch.tensor(computed["rates"])], [torch.tensor([0.1, 0.09])]) < 1e-7
        and weight_gap < 1e-12
        and refused,
        note="the tail has its own denominator",
    )


def _f17() -> Figure:
    torch.manual_seed(3)
    model = nn.Linear(4, 1, dtype=torch.float64)
    rows = torch.randn(32, 4, dtype=torch.float64)
    singles = []
    for piece in torch.split(rows, 8):
        model.zero_grad()
        torch.autograd.backward(model(piece).square().mean())
        singles.append(gradient_of(model))
    before = [p.detach().clone() for p in model.parameters()]
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for window in updater.windows([rows], rows=8, count=len):
        updater.update(window, lambda model, batch: model(batch).square().sum())
    moved = [old - p.detach() for old, p in zip(before, model.parameters(), strict=True)]
    mean = [torch.stack(parts).mean(0) for parts in zip(*singles, strict=True)]
    total = [torch.stack(parts).sum(0) for parts in zip(*singles, strict=True)]
    off = gap(moved, mean)
    ratio = _norm(total) / _norm(moved)
    return Figure(
        id="F17",
        setup="four equal microbatch gradients a, b, c, d",
        published={"update": "their mean", "sum_over_update": 4.0},
        computed={"update_less_their_mean": off, "sum_over_update": ratio},
        agrees=off < 1e-14 and close(ratio, 4.0, within=1e-12),
    )


def _trained(
    base: nn.Module, batches: Sequence[Pair], size: int, *, copies: bool = True
) -> tuple[nn.Module, list[Any]]:
    model = copy.deepcopy(base) if copies else base
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = Updater(model, optimizer, clip=ByGlobalNorm(1.0), schedule=StepLR(optimizer, 1, 0.9))
    records = [
        updater.update(window, _classify)
        for window in updater.windows(batches, size=size, count=targets())
    ]
    return model, records


def _classify(model: nn.Module, batch: Pair) -> LossSum:
    return cross_entropy(model(batch[0]), batch[1])


def _join(batches: Sequence[Pair]) -> Pair:
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.cat([t.flatten().double() for t in tensors]).norm())


def _weights(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def _buffer(module: nn.Module, name: str) -> Tensor:
    return module.get_buffer(name)


FIGURES: list[Compute] = [_f1, _f2, _f3, _f4, _f10, _f11, _f17]
