"""F12, F15, F16 and F18: rates, decay and the summary of a run."""

from __future__ import annotations

import math
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from .. import reference
from ..arithmetic import DecayExponents, decay_factor, keep_exponent
from ..clip.norm import ByGlobalNorm
from ..counts import elements
from ..losses import LossSum
from ..recipes.summary import Summary
from ..schedules import Scaled, presets
from ..updater import Updater
from .figure import Compute, Figure, all_of, close

__all__ = ["FIGURES"]


def _f12() -> Figure:
    original = decay_factor([0.01] * 100, 0.1)
    half = decay_factor([0.01] * 50, 0.05)
    twice = decay_factor([0.01] * 50, keep_exponent(0.1, rate_sum=1.0, new_rate_sum=0.5))
    exponents = DecayExponents()
    for _ in range(100):
        exponents.add([0.01], [0.1])
    return Figure(
        id="F12",
        setup="decay of 100 steps of 0.01 x 0.1 against 50 with half, and with twice, the decay",
        published={"twice_off_below": 1e-4, "half_off_above": 0.05},
        computed={
            "original": original,
            "twice_off": abs(original - twice),
            "half_off": abs(original - half),
            "exponent": exponents.totals[0],
        },
        agrees=abs(original - twice) < 1e-4
        and abs(original - half) > 0.05
        and abs(math.log(original) + exponents.totals[0]) < 1e-4,
        note="the exponent, the sum of rate x decay, is in every record",
    )


def _f15() -> Figure:
    rate = Scaled(schedule=presets.d2l_cosine(total=20, minimum=0.01 / 0.3), by=0.3)
    found = [rate(10), rate(20)]
    plain = [reference.cosine_decay(t, base=0.3, minimum=0.01, total=20) for t in (10, 20)]
    return Figure(
        id="F15",
        setup="cosine from 0.3 to 0.01 over 20",
        published={"at_10": 0.155, "at_20": 0.01},
        computed={"at_10": found[0], "at_20": found[1]},
        agrees=all_of(found, [0.155, 0.01], within=1e-12) and all_of(found, plain, within=1e-12),
        note="the same by `midstep.reference.cosine_decay`",
    )


def _f16() -> Figure:
    warmup = presets.torch_linear(total=3, start=0.1)
    optimizer = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the first rate is lost: the claim
        scheduler = LambdaLR(optimizer, warmup)
        at_start = []
        for _ in range(3):
            scheduler.step()
            at_start.append(round(100 * optimizer.param_groups[0]["lr"], 10))
            optimizer.step()
    model = nn.Linear(1, 1)
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=1.0), schedule=warmup)
    at_end = [
        round(100 * updater.update([torch.ones(1, 1)], _output, count=len).lr[0], 10)
        for _ in range(4)
    ]
    return Figure(
        id="F16",
        setup="warm-up over epochs: stepping at the start against at the end of each",
        published={"at_the_start": [40, 70, 100], "at_the_end": [10, 40, 70, 100]},
        computed={"at_the_start": at_start, "at_the_end": at_end},
        agrees=all_of(at_start, [40, 70, 100], within=1e-6)
        and all_of(at_end, [10, 40, 70, 100], within=1e-6),
        note="the updater's schedule moves after the optimizer, so the first rate is used",
    )


def _f18() -> Figure:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    updater = Updater(model, optimizer, clip=ByGlobalNorm(1.0))
    x = torch.randn(32 * 16, 10)
    y = 0.15 * x.sum(1, keepdim=True) + 0.1 * torch.randn(32 * 16, 1)
    microbatches = list(zip(torch.split(x, 16), torch.split(y, 16), strict=True))
    records = [
        updater.update(window, _squared)
        for window in updater.windows(microbatches, size=4, count=elements())
    ]
    summary = Summary.of(records)
    share = summary.clipped_share
    assert summary.mean_norm is not None
    assert summary.largest_norm is not None
    assert share is not None
    computed = {
        "updates": summary.num_applied,
        "microbatches": summary.num_microbatches,
        "mean_norm": summary.mean_norm,
        "largest_norm": summary.largest_norm,
        "clipped_percent": 100 * share,
    }
    # The data of the document is not given, so its norms cannot be computed; that they are those of
    # one run, and 25 % a number of its updates, can.
    published = {
        "updates": 8,
        "microbatches": 32,
        "mean_norm": 0.7082,
        "largest_norm": 1.1775,
        "clipped_percent": 25.0,
    }
    norms = [record.grad_norm for record in records if record.grad_norm is not None]
    return Figure(
        id="F18",
        setup="Linear 10-64, ReLU, Linear 64-1, Adam 0.001, windows of 4, clip 1",
        published=published,
        computed=computed,
        agrees=summary.num_applied == 8
        and summary.num_microbatches == 32
        and close(summary.mean_norm, math.fsum(norms) / len(norms), within=1e-12)
        and summary.largest_norm == max(norms)
        and share == sum(norm > 1.0 for norm in norms) / 8
        and _is_of_one_run(published)
        and _is_of_one_run(computed),
        note="the data is not given, so the norms are others; what both must hold is checked",
    )


def _is_of_one_run(summary: dict[str, float]) -> bool:
    """Whether mean, largest and share can be of norms of so many updates, clipped above 1."""
    num, largest = summary["updates"], summary["largest_norm"]
    num_clipped = summary["clipped_percent"] / 100 * num
    mean, rest = summary["mean_norm"], num - num_clipped
    return (
        num_clipped == round(num_clipped)
        and (largest > 1.0) == (num_clipped > 0)
        and num_clipped <= mean * num <= num_clipped * largest + rest
    )


def _output(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = model(batch).sum()
    return total


def _squared(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> LossSum:
    total = F.mse_loss(model(batch[0]), batch[1], reduction="sum")
    return LossSum(total, batch[1].numel())


FIGURES: list[Compute] = [_f12, _f15, _f16, _f18]
