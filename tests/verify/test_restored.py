"""Nothing is left changed: to the last bit, and after an error of any kind, too."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import setups as s
import torch
from torch import Tensor, nn

import midstep as ms


class Restless(nn.Module):
    """Everything that a forward can change: buffers, attributes, modes, streams."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(s.WIDTH, 8))
        self.norm = nn.BatchNorm1d(8, momentum=0.3)
        self.drop = nn.Dropout(0.2)
        self.frozen = nn.Dropout(0.2).eval()
        self.b = nn.Linear(8, s.CLASSES)
        self.b.bias.requires_grad = False
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.constant = torch.tensor([1.5])
        self.stream = torch.Generator().manual_seed(5)
        self.calls = 0
        self.is_watched = False
        self.history: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(self.calls)
        if not self.is_watched:
            self.is_watched = True
            self.drop.register_forward_hook(lambda *_: None)
        self.last = x.detach()
        self.seen = self.seen + len(x)
        self.frozen.train()
        random.random()
        np.random.rand()  # noqa: NPY002
        noise = torch.rand(len(x), 1, generator=self.stream)
        return self.b(self.drop(self.norm(self.a(x) * self.constant + noise)))


def prepared() -> tuple[Restless, torch.optim.Optimizer, ms.ByQuantile]:
    model = Restless()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    clip = ms.ByQuantile(0.9, window=5, warmup=2)
    updater = ms.Updater(model, optimizer, clip=clip)
    for _ in range(3):
        updater.update([s.pairs()], s.summed, count=ms.targets())
    return model, optimizer, clip


def everything(model: Restless, optimizer: torch.optim.Optimizer, clip: Any) -> dict[str, Any]:
    """All of it, by identity where identity counts, else by value."""
    streams = (random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state())  # noqa: NPY002
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "objects": [(id(t), t.data_ptr(), t.dtype, t.requires_grad) for t in tensors],
        "numbers": [t.detach().clone() for t in tensors],
        "gradients": [(id(p.grad), None if p.grad is None else p.grad.clone()) for p in tensors],
        "optimizer": {
            (id(p), key): value.clone() if isinstance(value, Tensor) else value
            for p, state in optimizer.state.items()
            for key, value in state.items()
        },
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "clip": clip.state_dict(),
        "modes": [module.training for module in model.modules()],
        "attributes": [
            {k: id(v) for k, v in vars(module).items() if not isinstance(v, (bool, int))}
            for module in model.modules()
        ],
        "calls": (model.calls, list(model.history), model.is_watched),
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in model.modules()
        ],
        "streams": [streams[0], *streams[1], streams[2], model.stream.get_state()],
        "modes of torch": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before if not same(before[name], after[name])]


def test_the_comparison_sees_each_thing_that_may_change() -> None:
    model, optimizer, clip = prepared()
    before = everything(model, optimizer, clip)
    s.summed(model, s.pairs()).backward()
    optimizer.step()
    model.eval()
    seen = differences(before, everything(model, optimizer, clip))
    assert {"numbers", "gradients", "optimizer", "modes", "calls", "streams"} <= set(seen)


def test_nothing_is_left_changed() -> None:
    model, optimizer, clip = prepared()
    batch = s.pairs()
    rows = [t.clone() for t in batch]
    before = everything(model, optimizer, clip)
    certificate = ms.verify(
        model, batch, s.summed, count=ms.targets(), optimizer=optimizer, clip=clip
    )
    assert not certificate.equal
    assert differences(before, everything(model, optimizer, clip)) == []
    assert same(list(batch), rows)


def calls_of_a_check() -> int:
    model, optimizer, clip = prepared()
    calls: Iterator[int] = iter(range(10**6))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        next(calls)
        return s.summed(model, batch)

    ms.verify(model, s.pairs(), loss, count=ms.targets(), optimizer=optimizer, clip=clip)
    return next(calls)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_nothing_is_left_changed_by_an_error_wherever_it_comes(
    error: type[BaseException],
) -> None:
    num_calls = calls_of_a_check()
    assert num_calls > 20
    places = range(0, num_calls, 5 if error is KeyboardInterrupt else 17)
    for place in places:
        model, optimizer, clip = prepared()
        calls = iter(range(10**6))

        def loss(
            model: nn.Module, batch: Any, calls: Iterator[int] = calls, place: int = place
        ) -> Tensor:
            value = s.summed(model, batch)
            if next(calls) == place:
                raise error("here")
            return value

        before = everything(model, optimizer, clip)
        with contextlib.suppress(error):
            ms.verify(model, s.pairs(), loss, count=ms.targets(), optimizer=optimizer, clip=clip)
        assert differences(before, everything(model, optimizer, clip)) == [], place


def test_nothing_is_left_changed_by_a_refusal() -> None:
    model, optimizer, clip = prepared()
    refused: list[tuple[Any, Any]] = [
        ((torch.ones(2, s.WIDTH), torch.tensor([0, 1])), s.summed),
        (s.pairs(), lambda m, b: m(b[0])),
        ((s.vectors(), torch.full((s.ROWS,), -100)), s.summed),
        (s.pairs(), lambda m, b: s.summed(m, b) * 0),
        (s.pairs(), lambda m, b: s.summed(m, b) * float("nan")),
    ]
    before = everything(model, optimizer, clip)
    for batch, loss in refused:
        with pytest.raises((ValueError, TypeError)):
            ms.verify(model, batch, loss, count=ms.targets(), optimizer=optimizer, clip=clip)
        assert differences(before, everything(model, optimizer, clip)) == []


def test_a_parameter_that_is_also_known_elsewhere_is_the_same_one_afterwards() -> None:
    model = s.mlp()
    weight = model[0].weight
    view = weight.detach()[0]
    ms.verify(model, s.pairs(), s.summed, count=ms.targets())
    with torch.no_grad():
        weight[0].fill_(3.0)
    assert view.tolist() == [3.0] * s.WIDTH  # still one memory
    s.summed(model, s.pairs()).backward()  # and autograd still knows it
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_a_check_in_the_middle_of_training_changes_nothing_in_it() -> None:
    def trained(*, checks: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model = s.mlp(nn.Dropout(0.3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(4):
            if checks:
                ms.verify(model, s.pairs(), s.summed, count=ms.targets(), optimizer=optimizer)
            s.summed(model, s.pairs()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    assert same(trained(checks=True), trained(checks=False))
