"""What DDP itself can be asked for: unused parameters, bucket views, buffers, ignored wrappers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed.loops import SIZE, loss, stepped
from distributed.models import batches, gradients, oracle, plain_model, worst
from distributed.processes import run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import midstep as ms

pytestmark = pytest.mark.distributed

# The middle rank of three has no batch in the second window, and fewer in the first.
LOADS = (4, 1, 3)


class Branches(nn.Module):
    """Two branches of which a batch takes one, and one that none takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 2).double()
        self.second = nn.Linear(3, 2).double()
        self.never = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if x[0, 0] > 0 else self.second(x)


def branch_data(rank: int) -> list[Tensor]:
    """By sign of the first entry. In the second window nobody takes the first branch."""
    signs = {0: (1, -1, -1, -1), 1: (1,), 2: (1, 1, -1)}[rank]
    return [torch.full((2, 3), 0.5 * sign * (rank + 1), dtype=torch.float64) for sign in signs]


def zero_count(x: Tensor) -> int:
    """The last batch of rank 2 counts nothing."""
    return 0 if x[0, 0] == -1.5 else len(x)


def unused(rank: int, size: int, options: dict[str, bool], streamed: bool) -> Any:
    del size
    model = DistributedDataParallel(Branches(), find_unused_parameters=True, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    updater = ms.Updater(model, optimizer)
    found = []
    count = None if streamed else zero_count
    for window in updater.windows(branch_data(rank), size=2, count=count):
        for x in window:
            with window.forward():
                value = model(x).square().sum()
            window.backward(ms.LossSum(value, zero_count(x)))
        window.step()
        found.append((gradients(model), [p.detach().clone() for p in model.parameters()]))
    return found


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("view", [False, True])
def test_parameters_no_rank_used_have_no_gradient_and_do_not_decay(
    view: bool, streamed: bool
) -> None:
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    results = run(unused, {"gradient_as_bucket_view": view}, streamed, size=3)
    for index in range(2):
        window = [x for r in range(3) for x in branch_data(r)[2 * index : 2 * index + 2]]
        total = sum(zero_count(x) for x in window)
        optimizer.zero_grad()
        sum(model(x).square().sum() / total for x in window if zero_count(x)).backward()
        optimizer.step()
        for found in results:
            grads, weights = found[index]
            assert worst(grads, [p.grad for p in model.parameters()]) < 1e-14
            assert worst(weights, list(model.parameters())) < 1e-14


def loss_past_it(model: DistributedDataParallel, batch: Any) -> ms.LossSum:
    return loss(model.module, batch)


def with_options(rank: int, size: int, options: dict[str, Any], bypass: bool) -> Any:
    del size
    model = DistributedDataParallel(plain_model(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    updater = ms.Updater(model, optimizer, clip=ms.ByGlobalNorm(0.5), empty=ms.Skip())
    pointers, found = set(), []
    for window in updater.windows(batches(LOADS[rank], seed=rank), size=SIZE, count=ms.targets()):
        record = updater.update(window, loss_past_it if bypass else loss)
        if record.applied:
            found.append(gradients(model))
            pointers.add(tuple(p.grad.data_ptr() for p in model.parameters()))
    return found, len(pointers)


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.0001},
    ],
    ids=lambda options: "".join(options) or "as it comes",
)
def test_the_gradient_is_exact_with_any_option_and_past_the_wrapper(
    options: dict[str, Any], bypass: bool
) -> None:
    """A model called past its wrapper would never be reduced by DDP alone."""
    parts = [batches(count, seed=rank) for rank, count in enumerate(LOADS)]
    wanted = oracle(parts, size=SIZE, max_norm=0.5)
    for found, num_places in run(with_options, options, bypass, size=3):
        assert len(found) == len(wanted)
        for grads, step in zip(found, wanted, strict=True):
            assert worst(grads, step.gradients) < 1e-12
        if options.get("gradient_as_bucket_view") and not bypass:
            assert num_places <= 2  # buckets are made anew once, and gradients stay inside them


class Normed(nn.Module):
    """BatchNorm and dropout: a forward that writes buffers and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)
        ).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def buffers(rank: int, size: int, policy: ms.Raise | ms.Skip) -> Any:
    """Rank 2 has one batch, then none; the last window's gradient is not finite."""
    del size
    model = DistributedDataParallel(Normed())
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), nonfinite=policy)
    generator = torch.Generator().manual_seed(rank)
    data = [
        torch.randn(3, 6, generator=generator, dtype=torch.float64) for _ in range((6, 6, 1)[rank])
    ]
    torch.manual_seed(100 + rank)
    found = []
    try:
        for index, window in enumerate(updater.windows(data, size=2, count=ms.rows())):
            factor = float("inf") if index == 2 and rank == 1 else 1.0
            updater.update(window, _scaled(factor))
            found.append([b.clone() for b in model.buffers()])
    except ms.NonFiniteGradient as error:
        found.append((error.microbatch, error.rank))
    return found, torch.rand(1).item()


def _scaled(factor: float) -> Callable[[Any, Any], Tensor]:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004 - torch's own
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004 - torch's own
            return grad * factor

    return lambda model, x: Scale.apply(model(x)).square().sum()


def test_a_rank_without_a_batch_writes_no_buffer_and_draws_no_number() -> None:
    results = run(buffers, ms.Skip(), size=3)
    for found, _ in results:
        # Three windows of two batches: rank 0 has run 2, 4 and 6, rank 2 but one.
        assert [int(window[2]) for window in found] == (
            [2, 4, 6] if found is not results[2][0] else [1, 2, 4]
        )
    drawn = results[2][1]
    torch.manual_seed(102)
    model = Normed()
    torch.manual_seed(102)
    model(torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator()))
    assert drawn == torch.rand(1).item()


def test_the_search_for_a_bad_microbatch_is_no_matter_of_buffers() -> None:
    """Ranks run different numbers of forwards in it, so DDP must not broadcast any."""
    results = run(buffers, ms.Raise(), size=3)
    assert [found[-1] for found, _ in results] == [(0, 1)] * 3


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(6, 3, sparse=True).double()
        self.head = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x))


def sparse(rank: int, size: int) -> Any:
    del size
    model = DistributedDataParallel(Words())
    updater = ms.Updater(
        model, torch.optim.SGD(model.parameters(), lr=0.0), clip=ms.ByGlobalNorm(0.5)
    )
    data = [torch.tensor([[1, 2], [2, 5]]), torch.tensor([[1, 1]]), torch.tensor([[4, 0]])]
    data = data if rank == 0 else data[:0]
    found = []
    for window in updater.windows(data, size=2, count=ms.elements()):
        record = updater.update(window, lambda m, x: m(x).square().sum())
        grads = [p.grad.to_dense().clone() for p in model.parameters()]
        found.append((grads, record.grad_norm))
    return found


def test_sparse_gradients_add_up_with_a_rank_that_has_none() -> None:
    model = Words()
    x = [torch.tensor([[1, 2], [2, 5]]), torch.tensor([[1, 1]])]
    (sum(model(b).square().sum() for b in x) / 6).backward()
    true = [p.grad.to_dense() for p in model.parameters()]
    norm = torch.cat([g.flatten() for g in true]).norm().item()
    for found in run(sparse, size=2):
        grads, grad_norm = found[0]
        assert grad_norm == pytest.approx(norm, rel=1e-12)
        assert worst(grads, [g * min(1.0, 0.5 / norm) for g in true]) < 1e-14
        assert len(found) == 2


def half(rank: int, size: int) -> Any:
    del size
    model = DistributedDataParallel(plain_model(torch.float32))
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.0), precision=ms.BF16())
    data = batches(LOADS[rank], seed=rank, dtype=torch.float32)
    windows = updater.windows(data, size=4, count=ms.targets())
    return [(stepped(updater, window).grad_norm, gradients(model)) for window in windows]


def test_bfloat16_autocast_gives_one_gradient_on_all_ranks() -> None:
    results = run(half, size=3)
    parts = [batches(n, seed=rank, dtype=torch.float32) for rank, n in enumerate(LOADS)]
    wanted = oracle(parts, size=4)
    assert all(worst(found[0][1], results[0][0][1]) == 0.0 for found in results)
    assert all(found[0][0] == results[0][0][0] for found in results)
    assert results[0][0][0] == pytest.approx(wanted[0].grad_norm, rel=0.02)


def compiled(rank: int, size: int, outside: bool) -> Any:
    del size
    warnings.simplefilter("ignore")  # the compiler has its own to say
    model: Any = plain_model()
    if outside:
        model = torch.compile(DistributedDataParallel(model), backend="eager")
    else:
        model = DistributedDataParallel(torch.compile(model, backend="eager"))
    updater = ms.Updater(
        model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1), empty=ms.Skip()
    )
    windows = updater.windows(batches(LOADS[rank], seed=rank), size=SIZE, count=ms.targets())
    return [gradients(model) for window in windows if updater.update(window, loss).applied]


@pytest.mark.parametrize("outside", [False, True])
def test_a_compiled_model_reduces_once_a_window_too(outside: bool) -> None:
    parts = [batches(count, seed=rank) for rank, count in enumerate(LOADS)]
    wanted = oracle(parts, size=SIZE)
    for found in run(compiled, outside, size=3):
        assert len(found) == len(wanted)
        for grads, step in zip(found, wanted, strict=True):
            assert worst(grads, step.gradients) < 1e-12
