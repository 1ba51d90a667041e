"""F5 to F9: what clipping keeps, what it changes, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..clip import clip_grad_norm_, clip_grad_value_, total_norm
from ..clip.norm import ByGlobalNorm
from ..clip.rule import Attempt
from ..counts import elements
from ..errors import NonFiniteGradient
from ..gradients import Gradients
from ..updater import Updater
from .accumulation import gap, gradient_of, regression_rows, regressor, squared_error
from .figure import Compute, Figure, all_of, close

__all__ = ["FIGURES"]

FACTOR = 50.0  # far enough away to make large gradients


def _f5() -> Figure:
    model = regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    updater = Updater(model, optimizer, clip=ByGlobalNorm(1.0))
    record = updater.update([regression_rows(FACTOR)], squared_error, count=elements())
    clipped = gradient_of(model)
    norm, after = record.grad_norm or math.nan, total_norm(clipped).item()
    each = [total_norm([g]).item() for g in clipped]
    published = [0.380417, 0.086949, 0.920664, 0.010048]
    return Figure(
        id="F5",
        setup="F1's model, targets times 50, clipped to 1",
        published={"norm": 206.352, "after": 1.0, "by_tensor": published},
        computed={"norm": norm, "after": after, "by_tensor": each},
        agrees=close(norm, 206.352, within=1e-3)
        and close(after, 1.0, within=1e-6)
        and all_of(each, published, within=2e-6),
        note="the record holds the norm before clipping, whether it fired or not",
    )


def _f6() -> Figure:
    each, once = _clipped(is_each=True), _clipped(is_each=False)
    norms = [total_norm(each).item(), total_norm(once).item()]
    apart = gap(each, once)
    return Figure(
        id="F6",
        setup="F5 cut 4 x 16: clip each microbatch against clip once",
        published={"norms": [1.0, 1.0], "apart": 0.244837},
        computed={"norms": norms, "apart": apart},
        agrees=all_of(norms, [1.0, 1.0], within=1e-6) and close(apart, 0.244837, within=1e-5),
        note="a rule of the library runs once, after the sum",
    )


def _f7() -> Figure:
    model = _poisoned()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    flat = torch.cat([g.flatten() for g in gradient_of(model)])
    by_torch = [norm, int((flat == 0).sum()), int(flat.isnan().sum())]
    ours = _poisoned()
    before = gradient_of(ours)
    named: dict[str, int] = {}
    try:
        clip_grad_norm_(ours.parameters(), 1.0)
    except NonFiniteGradient as error:
        named = dict(error.parameters)
    is_untouched = all(
        torch.equal(old, new) for old, new in zip(before, gradient_of(ours), strict=True)
    )
    computed: dict[str, Any] = {
        "norm": by_torch[0],
        "zeros": by_torch[1],
        "nans": by_torch[2],
        "here_refused_naming": ", ".join(named) or None,
        "here_untouched": is_untouched,
    }
    return Figure(
        id="F7",
        setup="F5 with one inf among 321 entries, clipped by torch's default",
        published={"norm": math.inf, "zeros": 320, "nans": 1},
        computed=computed,
        agrees=by_torch == [math.inf, 320, 1] and named == {"parameters[0]": 1} and is_untouched,
        note="refused here: the parameter is named and nothing is touched",
    )


def _f8() -> Figure:
    by_norm, by_value = _vector(), _vector()
    clip_grad_norm_([by_norm], 1.0)
    clip_grad_value_([by_value], 1.0)
    joint = total_norm([torch.tensor([3.0]), torch.tensor([4.0])]).item()
    found = [_values(by_norm), _values(by_value)]
    return Figure(
        id="F8",
        setup="g = (3, 4): norm clip to 1, value clip to 1, norm from its parts",
        published={"by_norm": [0.6, 0.8], "by_value": [1.0, 1.0], "total": 5.0},
        computed={"by_norm": found[0], "by_value": found[1], "total": joint},
        agrees=all_of(found[0], [0.6, 0.8], within=1e-6)
        and found[1] == [1.0, 1.0]
        and joint == 5.0,
    )


def _f9() -> Figure:
    early = _vector(1024.0)
    clip_grad_norm_([early], 1.0)
    assert early.grad is not None
    before = (early.grad / 1024.0).norm().item()
    late = _vector(1024.0)
    gradients = Gradients([late], factor=1 / 1024)  # as an update hands it to the rule
    ByGlobalNorm(1.0).decide(gradients, Attempt(step=0))
    gradients.apply_()
    assert late.grad is not None
    after = late.grad.norm().item()
    return Figure(
        id="F9",
        setup="clip before unscaling at scale 1024 against after",
        published={"before_below": 0.001, "after_about": 1.0},
        computed={"before": before, "after": after},
        agrees=before < 0.001 and close(after, 1.0, within=1e-6),
        note="a rule sees the true gradient, never the scaled one",
    )


def _clipped(*, is_each: bool) -> list[Tensor]:
    model = regressor()
    x, y = regression_rows(FACTOR)
    for rows in torch.split(torch.arange(64), 16):
        torch.autograd.backward(F.mse_loss(model(x[rows]), y[rows]) / 4)
        if is_each:
            clip_grad_norm_(model.parameters(), 1.0)
    if is_each:
        return gradient_of(model)
    model = regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    updater = Updater(model, optimizer, clip=ByGlobalNorm(1.0))
    for window in updater.windows([(x, y)], rows=16, count=elements()):
        updater.update(window, squared_error)
    return gradient_of(model)


def _poisoned() -> nn.Sequential:
    model = regressor()
    x, y = regression_rows(FACTOR)
    torch.autograd.backward(F.mse_loss(model(x), y))
    first = next(model.parameters())
    assert first.grad is not None
    first.grad[0, 0] = math.inf
    return model


def _vector(factor: float = 1.0) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0]) * factor
    return parameter


def _values(parameter: nn.Parameter) -> list[float]:
    assert parameter.grad is not None
    values: list[float] = parameter.grad.tolist()
    return values


FIGURES: list[Compute] = [_f5, _f6, _f7, _f8, _f9]
