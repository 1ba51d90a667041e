"""Clip rules that remember, or look at weights, on shards: update for update as on one process.

The oracle clips the gradients of one process in plain float64, by each rule's formula.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from distributed.models import WRAPPINGS, plain_model, weights, worst
from distributed.processes import run
from torch import Tensor, nn

import midstep as ms

pytestmark = pytest.mark.distributed

NUM_UPDATES = 9
LR = 0.05
# Norms that rise and fall, and one that stands out, from which every rule must act.
SCALES = (1.0, 1.3, 0.8, 1.1, 0.9, 1.2, 9.0, 1.0, 0.3)
# 5 rows, so that shards are uneven; the ranks see different numbers of them.
ROWS = torch.linspace(-2.0, 2.0, 60, dtype=torch.float64).view(10, 6).sin()


def loss_sum(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def rules() -> dict[str, Callable[[nn.Module], Any]]:
    return {
        "quantile": lambda _: ms.ByQuantile(q=0.6, window=4, warmup=2, cap=2.0),
        "z-score": lambda _: ms.ByZScore(z=0.5, beta=0.8, warmup=3, cap=5.0, patience=2),
        "rms": lambda _: ms.ByRms(0.02),
        "adaptive": lambda m: ms.Adaptive(0.05, exempt=list(m.parameters())[-1]),
        "tensor average": lambda _: ms.ByTensorAverage(factor=1.05, beta=0.7, warmup=2, cap=3.0),
        "spike": lambda _: ms.SkipSpike(sigma=4.0, window=6),
        "chain": lambda m: ms.Chain(
            ms.SkipSpike(sigma=4.0, window=6),
            ms.Adaptive(0.05, exempt=list(m.parameters())[-1]),
            ms.ByRms(0.02),
            ms.ByQuantile(q=0.6, window=4, warmup=2, cap=2.0),
        ),
    }


@dataclasses.dataclass
class Seen:
    """What an update must leave: gradients where it was applied, and what the record says."""

    applied: bool
    clipped: bool
    gradients: list[Tensor]
    weights: list[Tensor]
    grad_norm: float


def norm_of(grads: list[Tensor]) -> float:
    return math.sqrt(sum(g.square().sum().item() for g in grads))


def scaled(grads: list[Tensor], limit: float) -> list[Tensor]:
    norm = norm_of(grads)
    return [g * min(1.0, limit / norm) for g in grads]


class Quantile:
    def __init__(self) -> None:
        self.norms: list[float] = []

    def clip(self, grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        del params
        limit = 2.0 if len(self.norms) < 2 else min(2.0, np.quantile(self.norms[-4:], 0.6))
        self.norms.append(norm_of(grads))
        return scaled(grads, limit)


class ZScore:
    def __init__(self) -> None:
        self.first: list[float] = []
        self.high: list[float] = []
        self.mean, self.variance = math.inf, 0.0

    def clip(self, grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        del params
        norm, limit = norm_of(grads), self.mean + 0.5 * math.sqrt(self.variance)
        if len(self.first) < 3:
            self.first.append(norm)
            if len(self.first) == 3:
                self.mean, self.variance = np.mean(self.first), np.var(self.first)
            return scaled(grads, min(5.0, limit))
        self.high = [*self.high, norm] if norm > limit else []
        if len(self.high) == 2:
            self.mean, self.variance, self.high = np.mean(self.high), np.var(self.high), []
        else:
            x = min(norm, limit)
            self.mean = 0.8 * self.mean + 0.2 * x
            self.variance = 0.8 * self.variance + 0.2 * (x - self.mean) ** 2
        return scaled(grads, min(5.0, limit))


class Rms:
    def clip(self, grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        del params
        return [g * min(1.0, 0.02 / g.square().mean().sqrt().item()) for g in grads]


class Adaptive:
    def clip(self, grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        return [*map(self.units, grads[:-1], params[:-1]), grads[-1]]

    def units(self, grad: Tensor, weight: Tensor) -> Tensor:
        dims = tuple(range(1, grad.ndim)) or (0,)
        own = grad.square().sum(dims, keepdim=True).sqrt()
        largest = 0.05 * weight.square().sum(dims, keepdim=True).sqrt().clamp(min=1e-3)
        return grad * torch.where(own > largest, largest / own, 1.0)


class TensorAverage:
    def __init__(self) -> None:
        self.averages: list[float] = []
        self.num = 0

    def clip(self, grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        del params
        if self.num >= 2:
            limits = [1.05 * max(average, 1e-3) for average in self.averages]
            grads = [g * min(1.0, n / norm_of([g])) for g, n in zip(grads, limits, strict=True)]
        grads = scaled(grads, 3.0)
        norms = [norm_of([g]) for g in grads]
        before = self.averages or norms
        self.averages = [
            min(a, n) if self.num < 2 else 0.7 * a + 0.3 * n
            for a, n in zip(before, norms, strict=True)
        ]
        self.num += 1
        return grads


class Spike:
    """Gives None for an update to skip."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.losses: list[float] = []

    def clip(self, grads: list[Tensor], loss: float) -> list[Tensor] | None:
        norm = norm_of(grads)
        if self.stands_out(norm, self.norms) or self.stands_out(loss, self.losses):
            return None
        self.norms, self.losses = [*self.norms, norm][-6:], [*self.losses, loss][-6:]
        return grads

    def stands_out(self, x: float, values: list[float]) -> bool:
        if len(values) < 3:
            return False
        median = statistics.median(values)
        spread = 1.4826 * statistics.median(abs(v - median) for v in values)
        return x > median + 4.0 * max(spread, 0.01 * median)


def oracle(name: str) -> Iterator[Seen]:
    """Train one process; every window is one batch."""
    model = plain_model()
    params = [p.detach() for p in model.parameters()]
    stages: dict[str, list[Any]] = {
        "quantile": [Quantile()],
        "z-score": [ZScore()],
        "rms": [Rms()],
        "adaptive": [Adaptive()],
        "tensor average": [TensorAverage()],
        "spike": [],
        "chain": [Adaptive(), Rms(), Quantile()],
    }
    spike = Spike() if name in {"spike", "chain"} else None
    for scale in SCALES:
        model.zero_grad()
        loss = loss_sum(model, ROWS) * scale / len(ROWS)
        loss.backward()
        true = [p.grad for p in model.parameters()]
        found: list[Tensor] | None = true
        if spike is not None:
            found = spike.clip(true, loss.item())
        if found is None:
            yield Seen(False, False, [], [p.clone() for p in params], norm_of(true))
            continue
        for stage in stages[name]:
            found = stage.clip(found, params)
        clipped = worst(found, true) > 0
        for param, grad in zip(params, found, strict=True):
            param.sub_(LR * grad)
        yield Seen(True, clipped, found, [p.clone() for p in params], norm_of(true))


def train(rank: int, size: int, kind: str) -> dict[str, Any]:
    del rank, size
    found: dict[str, Any] = {}
    for name, rule in rules().items():
        wrapped = WRAPPINGS[kind](plain_model())
        updater = ms.Updater(
            wrapped.model,
            torch.optim.SGD(wrapped.model.parameters(), lr=LR),
            clip=rule(wrapped.model),
        )
        rows = ROWS.tensor_split([3] if wrapped.data_size == 2 else wrapped.data_size)
        own = rows[wrapped.data_rank]
        world = updater._ranks.world
        seen = []
        for scale in SCALES:
            before = world.num_collectives
            record = updater.update(
                [own[:1], own[1:]], lambda m, x, s=scale: loss_sum(m, x) * s, count=len
            )
            cost = world.num_collectives - before
            seen.append((record, weights(wrapped.model), cost))
        found[name] = (seen, updater.clip.state_dict())
    return found


# Beyond the two of every window: norms that a rule changed and must know again, and units.
MOST_COLLECTIVES = {"adaptive": 3, "chain": 3}


@pytest.mark.parametrize(("kind", "size"), [("DDP", 2), ("FSDP2", 3), ("TP", 2), ("FSDP2 x TP", 4)])
def test_every_rule_clips_and_remembers_as_on_one_process(kind: str, size: int) -> None:
    wanted = {name: list(oracle(name)) for name in rules()}
    results = run(train, kind, size=size)
    for found in results:
        for name, (seen, state) in found.items():
            assert any(each.clipped or not each.applied for each in wanted[name]), name
            for update, ((record, after, cost), want) in enumerate(
                zip(seen, wanted[name], strict=True)
            ):
                place = (kind, name, update)
                assert record.applied == want.applied, place
                assert record.clipped == want.clipped, place
                assert record.grad_norm == pytest.approx(want.grad_norm, rel=1e-12), place
                assert worst(after, want.weights) < 1e-14, place
                assert cost <= MOST_COLLECTIVES.get(name, 2), place
                if want.applied:
                    coefficient = norm_of(want.gradients) / want.grad_norm
                    assert record.clip_coefficient == pytest.approx(coefficient, rel=1e-9), place
            assert state == results[0][name][1]
