"""A small model in every kind of parallel wrapping, uneven data, and the oracle for both.

The oracle is a plain torch loop of one process: all data that all ranks see in one window, in one
batch, in float64.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

Batch = tuple[Tensor, Tensor]

IGNORED = -100


def plain_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)
    ).to(dtype)


def batches(count: int, seed: int, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Batches of 1 to 3 rows, of which some, at times all, have no target."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        rows = int(torch.randint(1, 4, (), generator=generator))
        inputs = torch.randn(rows, 6, generator=generator, dtype=dtype)
        labels = torch.randint(0, 4, (rows,), generator=generator)
        labels[torch.rand(rows, generator=generator) < 0.3] = IGNORED
        found.append((inputs, labels))
    return found


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """A model as one rank has it.

    Attributes:
        model: Wrapped or sharded.
        data_rank: Which part of the data this rank sees.
        data_size: How many parts there are.
    """

    model: nn.Module
    data_rank: int
    data_size: int


def ddp(model: nn.Module) -> Wrapped:
    wrapped = DistributedDataParallel(model)
    return Wrapped(wrapped, dist.get_rank(), dist.get_world_size())


def fsdp2(model: nn.Module) -> Wrapped:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return Wrapped(sharded(model, mesh), dist.get_rank(), dist.get_world_size())


def hsdp(model: nn.Module) -> Wrapped:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    return Wrapped(sharded(model, mesh), dist.get_rank(), dist.get_world_size())


def tensor_parallel(model: nn.Module) -> Wrapped:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return Wrapped(tensor_split(model, mesh), 0, 1)


def fsdp2_and_tensor_parallel(model: nn.Module) -> Wrapped:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    sharded(tensor_split(model, mesh["tp"]), mesh["dp"])
    return Wrapped(model, mesh.get_local_rank("dp"), 2)


def ddp_and_tensor_parallel(model: nn.Module) -> Wrapped:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    wrapped = DistributedDataParallel(tensor_split(model, mesh["tp"]), device_mesh=mesh["dp"])
    return Wrapped(wrapped, mesh.get_local_rank("dp"), 2)


def sharded(model: nn.Module, mesh: object) -> nn.Module:
    for index in (0, 2):  # the last layer is the root's own
        fully_shard(model[index], mesh=mesh)  # type: ignore[index]
    return fully_shard(model, mesh=mesh)


def tensor_split(model: nn.Module, mesh: object) -> nn.Module:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


WRAPPINGS: dict[str, Callable[[nn.Module], Wrapped]] = {
    "DDP": ddp,
    "FSDP2": fsdp2,
    "HSDP": hsdp,
    "TP": tensor_parallel,
    "FSDP2 x TP": fsdp2_and_tensor_parallel,
}


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may lie in shards."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else whole(p.grad) for p in model.parameters()]


def weights(model: nn.Module) -> list[Tensor]:
    return [whole(p) for p in model.parameters()]


def worst(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> float:
    """The largest difference of any entry; inf where one has a tensor and the other none."""
    assert len(found) == len(wanted)
    most = 0.0
    for a, b in zip(found, wanted, strict=True):
        if (a is None) != (b is None):
            return float("inf")
        if a is not None and b is not None and a.numel():
            most = max(most, (a.double() - b.double()).abs().max().item())
    return most


@dataclasses.dataclass(frozen=True)
class Step:
    """What the oracle did in one window."""

    gradients: list[Tensor | None]
    weights: list[Tensor]
    grad_norm: float
    loss_mean: float
    denominator: int
    num_microbatches: int


def windows_of(parts: Sequence[Sequence[Batch]], size: int) -> Iterator[list[Batch]]:
    """The batches that all ranks together see in each window."""
    for start in range(0, max(map(len, parts)), size):
        yield [batch for part in parts for batch in part[start : start + size]]


def autocast_oracle(
    parts: Sequence[Sequence[Batch]], *, size: int, max_norm: float, scale: float
) -> list[Step]:
    """Train one process in float32 under float16 autocast, one batch after the other."""
    model = plain_model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    steps = []
    for window in windows_of(parts, size):
        denominator = sum(int((y != IGNORED).sum()) for _, y in window)
        if not denominator:
            continue
        optimizer.zero_grad()
        total = 0.0
        for inputs, labels in window:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(inputs).float(), labels, reduction="sum")
            (loss * (scale / denominator)).backward()
            total += loss.item()
        for parameter in model.parameters():
            parameter.grad.mul_(1.0 / scale)
        steps.append(_clipped_step(model, optimizer, max_norm, total / denominator, window))
    return steps


def _clipped_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    max_norm: float,
    loss_mean: float,
    window: Sequence[Batch],
) -> Step:
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    for parameter in model.parameters():
        parameter.grad.mul_(min(1.0, max_norm / norm))
    optimizer.step()
    denominator = sum(int((y != IGNORED).sum()) for _, y in window)
    return Step(gradients(model), weights(model), norm, loss_mean, denominator, len(window))


def oracle(
    parts: Sequence[Sequence[Batch]],
    *,
    size: int,
    max_norm: float = float("inf"),
    lr: float = 0.01,
) -> list[Step]:
    """Train one process on what all ranks see, each window as one batch in float64."""
    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    steps = []
    for window in windows_of(parts, size):
        inputs = torch.cat([x.double() for x, _ in window])
        labels = torch.cat([y for _, y in window])
        denominator = int((labels != IGNORED).sum())
        if not denominator:
            continue
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels, reduction="sum") / denominator
        loss.backward()
        steps.append(_clipped_step(model, optimizer, max_norm, loss.item(), window))
    return steps
