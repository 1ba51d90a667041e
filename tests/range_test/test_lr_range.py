"""The sweep: made as in training, and gone without a trace."""

import copy
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import midstep as ms
from midstep.range_test import CeilingKind, Outcome, lr_range

Pair = tuple[Tensor, Tensor]


def made(momentum: float = 0.9) -> tuple[nn.Sequential, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)
    )
    groups = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": [*model[1].parameters(), *model[4].parameters()], "lr": 0.01},
    ]
    return model, torch.optim.SGD(groups, lr=0.1, momentum=momentum, weight_decay=0.01)


def loader_of(num_rows: int = 640) -> torch.utils.data.DataLoader[Pair]:
    x = torch.randn(num_rows, 6, generator=torch.Generator().manual_seed(1))
    y = (x[:, :3] + 0.3 * x[:, 3:]).argmax(1)
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y),
        batch_size=16,
        shuffle=True,
        generator=torch.Generator().manual_seed(2),
    )


def loss(model: nn.Module, batch: Pair) -> ms.LossSum:
    return ms.cross_entropy(model(batch[0]), batch[1])


COUNT = ms.targets(key=1)


def everything(updater: ms.Updater, loader: torch.utils.data.DataLoader[Pair]) -> list[Any]:
    return copy.deepcopy(
        [
            list(updater.model.parameters()),
            [p.grad for p in updater.model.parameters()],
            list(updater.model.buffers()),
            [m.training for m in updater.model.modules()],
            updater.optimizer.state_dict(),
            updater.state_dict(),
            loader.generator.get_state() if loader.generator is not None else None,
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state(),  # noqa: NPY002 - the global one
        ]
    )


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def trained_updater(**settings: Any) -> tuple[ms.Updater, torch.utils.data.DataLoader[Pair]]:
    model, optimizer = made()
    updater = ms.Updater(
        model,
        optimizer,
        clip=ms.Chain(ms.ByGlobalNorm(1.0), ms.ByQuantile(0.9, warmup=2)),
        schedule=ms.schedules.cosine(total=100, warmup=4),
        averaged_model=AveragedModel(model),
        **settings,
    )
    loader = loader_of()
    for window in itertools.islice(updater.windows(loader, size=2, count=COUNT), 5):
        updater.update(window, loss)
    model[3].eval()
    return updater, loader


@pytest.mark.parametrize("precision", [ms.FP32(), ms.FP16()], ids=["fp32", "fp16"])
def test_a_range_test_leaves_everything_as_it_was_bit_for_bit(precision: Any) -> None:
    updater, loader = trained_updater(precision=precision)
    seen: list[Any] = []
    updater._books.sinks.append(seen.append)
    before = everything(updater, loader)
    averaged = copy.deepcopy(updater.averaged_model.state_dict())
    found = lr_range(
        updater, loader, loss, size=2, count=COUNT, start_lr=1e-5, num_updates=40, repeats=2
    )
    assert len(found.curves) == 2
    assert found.is_warm
    assert_same(before, everything(updater, loader))
    assert_same(dict(averaged), dict(updater.averaged_model.state_dict()))
    assert seen == []


class Interrupting:
    """Data that ends in a Ctrl-C in the middle of a sweep."""

    def __init__(self, batches: list[Pair], error: type[BaseException]) -> None:
        self._batches = batches
        self._error = error

    def __iter__(self) -> Iterator[Pair]:
        yield from self._batches[:30]
        raise self._error


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_range_test_leaves_everything_as_it_was(
    error: type[BaseException],
) -> None:
    updater, loader = trained_updater()
    batches = list(loader)
    before = everything(updater, loader)
    with pytest.raises(error):
        lr_range(updater, Interrupting(batches, error), loss, size=2, count=COUNT, num_updates=60)
    assert_same(before, everything(updater, loader))


def test_a_run_goes_on_after_a_range_test_as_if_there_had_been_none() -> None:
    def weights(*, with_test: bool) -> list[Tensor]:
        updater, loader = trained_updater()
        if with_test:
            lr_range(updater, loader, loss, size=2, count=COUNT, num_updates=20)
        for window in updater.windows(loader, size=2, count=COUNT):
            updater.update(window, loss)
        return list(updater.model.parameters())

    assert_same(weights(with_test=True), weights(with_test=False))


def test_each_point_is_the_update_that_a_plain_loop_makes_at_its_rate() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        x, y = torch.randn(96, 4), torch.randn(96, 1)
        batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 96, 8)]
        plain, ours = nn.Linear(4, 1), nn.Linear(4, 1)
        ours.load_state_dict(plain.state_dict())
        rates = [1e-3 * (100 ** (i / 14)) for i in range(15)]
        optimizer = torch.optim.AdamW(plain.parameters())
        losses = []
        pairs = itertools.cycle(zip(batches[::2], batches[1::2], strict=True))
        for lr, (one, two) in zip(rates, pairs, strict=False):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            mean = F.mse_loss(plain(torch.cat([one[0], two[0]])), torch.cat([one[1], two[1]]))
            mean.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
            losses.append(mean.item())
        updater = ms.Updater(ours, torch.optim.AdamW(ours.parameters()), clip=ms.ByGlobalNorm(0.5))
        found = lr_range(
            updater,
            batches,
            lambda model, batch: (model(batch[0]) - batch[1]).square().sum(),
            size=2,
            count=lambda batch: len(batch[0]),
            start_lr=1e-3,
            end_lr=0.1,
            num_updates=15,
        )
        assert found.curves[0].lr == pytest.approx(rates)
        assert found.curves[0].loss_mean == pytest.approx(losses, rel=1e-6)
    finally:
        torch.set_default_dtype(torch.float32)


def test_groups_keep_their_ratio_and_skipped_updates_are_no_points() -> None:
    model, optimizer = made()
    seen: list[list[float]] = []

    def watching(model: nn.Module, batch: Pair) -> ms.LossSum:
        seen.append([group["lr"] for group in optimizer.param_groups])
        return loss(model, batch)

    updater = ms.Updater(model, optimizer, precision=ms.FP16(init_scale=2.0**40))
    found = lr_range(
        updater,
        loader_of(),
        watching,
        size=1,
        count=COUNT,
        start_lr=1e-4,
        end_lr=1e-1,
        num_updates=16,
    )
    assert found.num_skipped > 3
    assert len(found.curves[0].lr) == 16
    assert all(other == pytest.approx(first / 10) for first, other in seen)
    assert seen[0] == seen[found.num_skipped] == pytest.approx([1e-4, 1e-5])
    assert seen[-1][0] == pytest.approx(1e-1)


def test_a_sweep_ends_where_the_loss_is_no_longer_finite() -> None:
    weight = nn.Parameter(torch.zeros(1))
    holder = nn.Module()
    holder.weight = weight
    updater = ms.Updater(holder, torch.optim.SGD([weight], lr=1.0))

    def breaking(model: Any, batch: Tensor) -> Tensor:
        loss_sum = -(model.weight * batch).sum()
        return loss_sum / 0 if optimizer_rate() > 0.1 else loss_sum

    def optimizer_rate() -> float:
        return float(updater.optimizer.param_groups[0]["lr"])

    found = lr_range(
        updater, [torch.ones(2)] * 5, breaking, size=1, count=ms.rows(), start_lr=1e-3, end_lr=10
    )
    assert not math.isfinite(found.curves[0].loss_mean[-1])
    assert found.curves[0].lr[-2] <= 0.1 < found.curves[0].lr[-1]
    assert found.reading.ceiling_kind is CeilingKind.NONFINITE


def test_a_loss_that_nothing_moves_gives_no_number() -> None:
    model = nn.Linear(2, 1)
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1))
    noise = torch.Generator().manual_seed(0)
    data = [torch.randn(4, 2, generator=noise) for _ in range(50)]
    found = lr_range(
        updater, data, lambda m, x: (0 * m(x) + x[:, :1]).sum(), size=1, count=ms.rows()
    )
    assert found.reading.outcome is Outcome.NO_DESCENT
    assert found.reading.upper is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"start_lr": 0.0}, "rise from a positive"),
        ({"end_lr": 1e-9}, "rise from a positive"),
        ({"num_updates": 5}, "fewer than 12 points"),
        ({"repeats": 0}, "at least 1 repeat"),
        ({"size": None}, "exactly one of"),
    ],
)
def test_what_cannot_be_swept_is_refused(change: dict[str, Any], words: str) -> None:
    model, optimizer = made()
    updater = ms.Updater(model, optimizer)
    settings = {"size": 1, "count": COUNT} | change
    with pytest.raises(ValueError, match=words):
        lr_range(updater, loader_of(), loss, **settings)
    with pytest.raises(ValueError, match="read only once"):
        lr_range(updater, iter(loader_of()), loss, size=1, count=COUNT)
    with pytest.raises(ValueError, match="no windows"):
        lr_range(updater, [], loss, size=1, count=COUNT)
