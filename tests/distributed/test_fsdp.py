"""What FSDP2 leaves to others: unsharded parameters, odd calls, evaluation between windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.models import gradients, weights, worst
from distributed.processes import outcomes_of, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import midstep as ms

pytestmark = pytest.mark.distributed


class Towers(nn.Module):
    """Two towers, sharded each by itself, a plain scale, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        self.right = nn.Linear(3, 2).double()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.unused = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def encode(self, x: Tensor) -> Tensor:
        """Calls one tower and is itself no forward."""
        return self.left(x)


def tower_loss(model: Any, x: Tensor) -> ms.LossSum:
    """Two calls of one tower and one of the other; the root's own forward is never run."""
    both = model.encode(x) + model.encode(-x[:1])
    return ms.LossSum((both * model.right(x) * model.scale).square().sum(), len(x))


def data_of(rank: int, counts: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(counts[rank])
    ]


def towers(rank: int, size: int, counts: tuple[int, ...]) -> Any:
    model = Towers()
    mesh = init_device_mesh("cpu", (size,))
    fully_shard(model.left, mesh=mesh)
    fully_shard(model.right, mesh=mesh)
    updater = ms.Updater(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    found = []
    for window in updater.windows(data_of(rank, counts), size=2, count=ms.rows()):
        record = updater.update(window, tower_loss)
        found.append((gradients(model), weights(model), record.grad_norm))
        with torch.no_grad():  # an evaluation, as often as each rank likes
            for x in data_of(rank, (3, 3)):
                model.left(x)
    kept = len(updater._ranks.parallel._calls.kept)
    return found, kept


@pytest.mark.parametrize("counts", [(4, 4), (4, 1), (0, 3)])
def test_towers_called_past_the_root_and_plain_parameters_beside_them(
    counts: tuple[int, ...],
) -> None:
    results = run(towers, counts, size=2)
    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for index in range(2):
        window = [x for r in range(2) for x in data_of(r, counts)[2 * index : 2 * index + 2]]
        total = sum(map(len, window))
        optimizer.zero_grad()
        sum(tower_loss(model, x).sum / total for x in window).backward()
        optimizer.step()
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        for found, kept in results:
            grads, after, grad_norm = found[index]
            assert worst(grads, [p.grad for p in model.parameters()]) < 1e-14
            assert worst(after, list(model.parameters())) < 1e-14
            assert grad_norm == pytest.approx(norm.norm().item(), rel=1e-12)
            assert kept == 3  # the calls of one microbatch, and none of the evaluation


class Split(nn.Module):
    """A layer that FSDP2 manages, and one that is only split by tensor parallel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.managed = nn.Linear(4, 4).double()
        self.up = nn.Linear(4, 8).double()
        self.down = nn.Linear(8, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.managed(x)).relu())


SPLIT_INPUTS = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)


def split(rank: int, size: int) -> Any:
    """Tensors on meshes of one axis each, of which FSDP2 knows one only."""
    del rank
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    model = Split()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model.managed, mesh=mesh["dp"])
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.0))
    rows = SPLIT_INPUTS[mesh.get_local_rank("dp") :: 2]
    record = updater.update([rows[:1], rows[1:]], lambda m, x: m(x).square().sum(), count=len)
    return gradients(model), record.grad_norm, record.denominators


def test_tensors_split_beside_the_sharded_ones_add_up_over_the_data_parallel_axis() -> None:
    model = Split()
    (model(SPLIT_INPUTS).square().sum() / 6).backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    for grads, grad_norm, denominators in run(split, size=4):
        assert denominators == {"loss": 6}
        assert worst(grads, [p.grad for p in model.parameters()]) < 1e-14
        assert grad_norm == pytest.approx(norm, rel=1e-12)


def differing(rank: int, size: int) -> None:
    model = Towers()
    mesh = init_device_mesh("cpu", (size,))
    fully_shard(model.left, mesh=mesh)
    fully_shard(model.right, mesh=mesh)
    with torch.no_grad():
        model.scale += rank
    ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.0))


def test_an_unsharded_parameter_that_differs_between_ranks_is_refused() -> None:
    for outcome in outcomes_of(differing, size=2):
        assert outcome.error == "ValueError", outcome
        assert "`scale` is not sharded and differs between ranks" in outcome.message


class Local(nn.Module):
    """A shared layer, and experts of the same name that are others on each rank pair."""

    def __init__(self, place: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(3, 3).double()
        torch.manual_seed(10 + place)
        self.expert = nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(self.shared(x))


def meshes(rank: int, size: int, clip: str) -> Any:
    """Experts sharded over the ranks that hold the same ones, the rest over all."""
    square = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("expert", "shard"))
    model = Local(square.get_local_rank("expert"))
    fully_shard(model.expert, mesh=square["shard"])
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    rule = ms.ByTensorNorm(0.2) if clip == "tensor" else ms.ByGlobalNorm(0.2)
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.0), clip=rule)
    record = updater.update([MESH_INPUTS[rank::size]], lambda m, x: m(x).square().sum(), count=len)
    return gradients(model.shared), gradients(model.expert), record


MESH_INPUTS = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3)


@pytest.mark.parametrize("clip", ["global", "tensor"])
def test_experts_sharded_over_some_ranks_are_others_elsewhere(clip: str) -> None:
    models = [Local(place) for place in range(2)]
    models[1].shared = models[0].shared
    total = sum(models[rank // 2](MESH_INPUTS[rank::4]).square().sum() for rank in range(4))
    (total / 8).backward()
    shared = [p.grad for p in models[0].shared.parameters()]
    own = [[p.grad for p in model.expert.parameters()] for model in models]
    norm = torch.cat([g.flatten() for g in (*shared, *own[0], *own[1])]).norm().item()

    def factor(grad: Tensor) -> float:
        return min(1.0, 0.2 / (grad.norm().item() if clip == "tensor" else norm))

    results = run(meshes, clip, size=4)
    for rank, (found_shared, found_own, record) in enumerate(results):
        assert record.grad_norm == pytest.approx(norm, rel=1e-12)
        assert worst(found_shared, [g * factor(g) for g in shared]) < 1e-14
        assert worst(found_own, [g * factor(g) for g in own[rank // 2]]) < 1e-14
    assert len({record.clip_coefficient for *_, record in results}) == 1


def precise(rank: int, size: int, fused: bool) -> Any:
    """Reduce in float32 what is computed in bfloat16, under autocast or FSDP2's own policy."""
    found = []
    for own in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if own
            else MixedPrecisionPolicy()
        )
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)), mp_policy=policy)
        updater = ms.Updater(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused),
            clip=ms.ByGlobalNorm(0.1),
            precision=None if own else ms.BF16(),
        )
        rows = torch.linspace(-1, 1, 48).view(8, 6)[: 6 - 5 * rank]
        for window in updater.windows(rows.split(1), size=3, count=ms.rows()):
            record = updater.update(window, lambda m, x: m(x).float().square().sum())
            found.append((gradients(model), record.grad_norm))
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_half_precision_with_a_rank_that_runs_out_of_batches(fused: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = torch.linspace(-1, 1, 48).view(8, 6)
    wanted = []
    for window in (torch.cat([rows[:3], rows[:1]]), rows[3:6]):
        optimizer.zero_grad()
        (model(window).square().sum() / len(window)).backward()
        wanted.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
    for found in run(precise, fused, size=2):
        for (grads, grad_norm), norm in zip(found, wanted * 2, strict=True):
            assert grad_norm == pytest.approx(norm, rel=0.02)
            total = torch.cat([g.flatten() for g in grads]).norm().item()
            assert total == pytest.approx(min(0.1, norm), rel=1e-5)


def many(rank: int, size: int, counts: tuple[int, ...]) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.0))
    rows = torch.linspace(-1, 1, 3 * sum(counts), dtype=torch.float64).view(-1, 3).split(counts)
    before = updater._ranks.world.num_collectives
    record = updater.update(
        list(rows[rank].split(1)), lambda m, x: m(x).square().sum(), count=ms.rows()
    )
    cost = updater._ranks.world.num_collectives - before
    return gradients(model), record.num_microbatches, cost


@pytest.mark.parametrize(("counts", "cost"), [((63, 2), 2), ((1, 64), 3), ((64, 70), 3)])
def test_the_fullest_rank_is_found_however_full_it_is(counts: tuple[int, ...], cost: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    rows = torch.linspace(-1, 1, 3 * sum(counts), dtype=torch.float64).view(-1, 3)
    (model(rows).square().sum() / len(rows)).backward()
    for grads, num_microbatches, found in run(many, counts, size=2):
        assert worst(grads, [p.grad for p in model.parameters()]) < 1e-14
        assert num_microbatches == sum(counts)
        assert found == cost
