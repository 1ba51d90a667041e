"""Norms and clip rules on shards: what one process would measure and do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.models import WRAPPINGS, gradients, plain_model, whole, worst
from distributed.processes import run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import midstep as ms

pytestmark = pytest.mark.distributed

ORDERS = (1.0, 2.0, 3.0, math.inf)
BATCH = torch.linspace(-2.0, 2.0, 60, dtype=torch.float64).view(10, 6)


def true_gradients() -> list[Tensor]:
    """The gradient of one process: of the summed squares of what the model gives, over 40."""
    model = plain_model()
    (model(BATCH).square().sum() / 40).backward()
    return [p.grad for p in model.parameters()]


def norm_of(tensors: list[Tensor], p: float) -> float:
    return torch.linalg.vector_norm(torch.cat([t.double().flatten() for t in tensors]), p).item()


def clipped(clip: str, grads: list[Tensor], model: nn.Module) -> list[Tensor]:
    """What a rule makes of gradients, in plain float64."""
    del model
    if clip.startswith("global"):
        norm = norm_of(grads, float(clip.split()[1]))
        return [g * min(1.0, 0.1 / norm) for g in grads]
    if clip == "tensor":
        return [g * min(1.0, 0.05 / norm_of([g], 2.0)) for g in grads]
    if clip == "group":
        first, second = norm_of(grads[:2], 2.0), norm_of(grads[2:], 2.0)
        factors = [min(1.0, 0.05 / first)] * 2 + [min(1.0, 0.1 / second)] * 4
        return [g * f for g, f in zip(grads, factors, strict=True)]
    if clip == "value":
        return [g.clamp(-0.01, 0.01) for g in grads]
    if clip == "chain":
        grads = clipped("tensor", clipped("value", grads, nn.Identity()), nn.Identity())
        return clipped("global 2", grads, nn.Identity())
    raise ValueError(clip)


def rule(clip: str, model: nn.Module) -> Any:
    parameters = list(model.parameters())
    return {
        "global 1": lambda: ms.ByGlobalNorm(0.1, p=1.0),
        "global 2": lambda: ms.ByGlobalNorm(0.1),
        "global 3": lambda: ms.ByGlobalNorm(0.1, p=3.0),
        "global inf": lambda: ms.ByGlobalNorm(0.1, p=math.inf),
        "tensor": lambda: ms.ByTensorNorm(0.05),
        "group": lambda: ms.ByGroupNorm([(parameters[:2], 0.05), (parameters[2:], 0.1)]),
        "value": lambda: ms.ByValue(0.01),
        "chain": lambda: ms.Chain(ms.ByValue(0.01), ms.ByTensorNorm(0.05), ms.ByGlobalNorm(0.1)),
    }[clip]()


CLIPS = ("global 1", "global 2", "global 3", "global inf", "tensor", "group", "value", "chain")


def update(rank: int, size: int, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    del rank, size
    found = {}
    for clip in CLIPS:
        wrapped = WRAPPINGS[kind](plain_model(dtype))
        updater = ms.Updater(
            wrapped.model,
            torch.optim.SGD(wrapped.model.parameters(), lr=0.0),
            clip=rule(clip, wrapped.model),
        )
        rows = BATCH.to(dtype).tensor_split(wrapped.data_size)[wrapped.data_rank]
        record = updater.update(
            [rows[:1], rows[1:]], lambda m, x: m(x).square().sum(), count=lambda x: 4 * len(x)
        )
        found[clip] = (gradients(wrapped.model), record)
    return found


@pytest.mark.parametrize("kind", WRAPPINGS)
def test_every_rule_clips_shards_as_it_clips_one_process(kind: str) -> None:
    for found in run(update, kind, torch.float64, size=4):
        for clip, (grads, record) in found.items():
            wanted = clipped(clip, true_gradients(), plain_model())
            assert worst(grads, wanted) < 1e-14, clip
            assert record.clipped
            p = float(clip.split()[1]) if "global" in clip else 2.0
            assert record.grad_norm == pytest.approx(norm_of(true_gradients(), p), rel=1e-12)


@pytest.mark.parametrize("kind", ["FSDP2 x TP"])
def test_norms_of_float32_shards_are_right_to_a_millionth(kind: str) -> None:
    for found in run(update, kind, torch.float32, size=4):
        for clip, (_, record) in found.items():
            p = float(clip.split()[1]) if "global" in clip else 2.0
            assert record.grad_norm == pytest.approx(norm_of(true_gradients(), p), rel=1e-6)


def mixture(rank: int, size: int) -> dict[str, Any]:
    """Parameters that are plain, and split over two meshes of one and two axes, by hand."""
    line = init_device_mesh("cpu", (size,))
    square = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b"))
    places = [
        (line, [Shard(0)]),
        (line, [Replicate()]),
        (square, [Replicate(), Shard(1)]),
        (square, [Shard(0), Shard(1)]),
        (square, [Shard(0), Replicate()]),
        (line, [Shard(0)]),  # 3 rows on 4 ranks: one has none
    ]
    shapes = [(8, 3), (5,), (4, 6), (4, 4), (6, 2), (3, 2)]
    generator = torch.Generator().manual_seed(1)
    full = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    plain = torch.randn(7, generator=generator, dtype=torch.float64)
    found: dict[str, Any] = {"true": [*full, plain]}

    def parameters() -> list[nn.Parameter]:
        split = []
        for (mesh, placements), grad in zip(places, full, strict=True):
            parameter = nn.Parameter(distribute_tensor(torch.zeros_like(grad), mesh, placements))
            parameter.grad = distribute_tensor(grad, mesh, placements)
            split.append(parameter)
        # Each rank holds a part of the sum.
        share = full[1] * (rank + 1) / 10.0
        split[1].grad = DTensor.from_local(share, line, [Partial()])
        own = nn.Parameter(torch.zeros_like(plain))
        own.grad = plain.clone()
        return [*split[:3], own, *split[3:]]

    for p in ORDERS:
        listed = parameters()
        norm = ms.clip_grad_norm_(listed, 0.5, norm_type=p)
        found["clip", p] = (norm, [whole(q.grad) for q in listed])
        found["total", p] = ms.total_norm([q.grad for q in parameters()], norm_type=p)
    listed = parameters()
    ms.clip_grad_value_(listed, 0.2)
    found["value"] = [whole(q.grad) for q in listed]
    if rank == 2:
        listed[-1].grad.to_local().fill_(math.nan)
    with pytest.raises(ms.NonFiniteGradient) as caught:
        ms.clip_grad_norm_(listed, 1.0)
    found["bad"] = caught.value.parameters
    with pytest.raises(NotImplementedError, match="order 0"):
        ms.total_norm([listed[0].grad], norm_type=0.0)
    return found


def test_drop_in_functions_measure_and_clip_a_mixture_of_meshes_and_plain_tensors() -> None:
    for found in run(mixture, size=4):
        *split, plain = found["true"]
        true = [*split[:3], plain, *split[3:]]
        for p in ORDERS:
            norm, grads = found["clip", p]
            assert norm.item() == pytest.approx(norm_of(true, p), rel=1e-12)
            assert found["total", p].item() == pytest.approx(norm_of(true, p), rel=1e-12)
            assert worst(grads, [g * min(1.0, 0.5 / norm_of(true, p)) for g in true]) < 1e-14
        assert worst(found["value"], [g.clamp(-0.2, 0.2) for g in true]) < 1e-15
        assert found["bad"] == {"parameters[6]": 2}


def dropped_in(rank: int, size: int, kind: str) -> dict[float, Any]:
    """A step of one's own, with nothing of midstep but the function."""
    del rank, size
    found = {}
    for p in ORDERS:
        model = WRAPPINGS[kind](plain_model()).model
        (model(BATCH).square().sum() / 40).backward()
        norm = ms.clip_grad_norm_(model.parameters(), 0.1, norm_type=p)
        found[p] = (norm.item(), gradients(model))
    return found


@pytest.mark.parametrize("kind", ["FSDP2", "HSDP", "TP", "FSDP2 x TP"])
def test_the_drop_in_function_clips_a_model_as_it_clips_one_process(kind: str) -> None:
    """Tensor parallel under FSDP2 has shards that torch does not call shards."""
    true = true_gradients()
    for found in run(dropped_in, kind, size=4):
        for p, (norm, grads) in found.items():
            assert norm == pytest.approx(norm_of(true, p), rel=1e-12)
            assert worst(grads, [g * min(1.0, 0.1 / norm_of(true, p)) for g in true]) < 1e-14


def huge(rank: int, size: int) -> list[float]:
    del size
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for scale in (1e200, 1e-200):
        model = fully_shard(nn.Linear(4, 4, bias=False).double(), mesh=mesh)
        updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.0))
        x = torch.ones(1, 4, dtype=torch.float64) * (1 - rank)
        record = updater.update(
            [x], lambda m, b, scale=scale: m(b).sum() * scale, count=lambda _: 1 - rank
        )
        found += [record.grad_norm, updater._ranks.world.num_collectives]
    return found


def test_norms_of_any_magnitude_are_right() -> None:
    for large, _, small, _ in run(huge, size=2):
        assert large == pytest.approx(4e200, rel=1e-12)
        assert small == pytest.approx(4e-200, rel=1e-12)


class Own(nn.Module):
    """A shared layer, and an expert of each rank's own."""

    def __init__(self, rank: int, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(3, 3).double()
        torch.manual_seed(10 + rank)
        self.add_module(name, nn.Linear(3, 3).double())
        self._name = name

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self._name)(self.shared(x))


EXPERT_INPUTS = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)


def experts(rank: int, size: int, wrapping: str, name: str, clip: str) -> dict[str, Any]:
    model = Own(rank, name.format(rank))
    expert = name.format(rank)
    if wrapping == "DDP":
        model._ddp_params_and_buffers_to_ignore = [f"{expert}.weight", f"{expert}.bias"]
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model.shared, mesh=init_device_mesh("cpu", (size,)))
        wrapped = model
    updater = ms.Updater(
        wrapped,
        torch.optim.SGD(wrapped.parameters(), lr=0.0),
        clip=ms.ByTensorNorm(0.3) if clip == "tensor" else ms.ByGlobalNorm(0.5),
    )
    rows = EXPERT_INPUTS[rank::size]
    record = updater.update([rows[:1], rows[1:]], lambda m, x: m(x).square().sum(), count=len)
    return {
        "shared": gradients(model.shared),
        "own": gradients(model.get_submodule(expert)),
        "record": record,
    }


@pytest.mark.parametrize(
    ("wrapping", "name", "clip"),
    [
        ("DDP", "expert", "global"),
        ("DDP", "expert", "tensor"),
        ("DDP", "expert_{}", "global"),
        ("FSDP2", "expert_{}", "global"),
    ],
)
def test_experts_of_some_ranks_only_count_once_and_get_their_own_gradient(
    wrapping: str, name: str, clip: str
) -> None:
    results = run(experts, wrapping, name, clip, size=2)
    models = [Own(rank, "expert") for rank in range(2)]
    models[1].shared = models[0].shared
    sum(models[r](EXPERT_INPUTS[r::2]).square().sum() for r in range(2)).div(4).backward()
    shared = [p.grad for p in models[0].shared.parameters()]
    own = [[p.grad for p in m.expert.parameters()] for m in models]
    norm = norm_of([*shared, *own[0], *own[1]], 2.0)

    def factor(grad: Tensor) -> float:
        if clip == "tensor":
            return min(1.0, 0.3 / norm_of([grad], 2.0))
        return min(1.0, 0.5 / norm)

    for rank, found in enumerate(results):
        assert found["record"].grad_norm == pytest.approx(norm, rel=1e-12)
        assert worst(found["shared"], [g * factor(g) for g in shared]) < 1e-14
        assert worst(found["own"], [g * factor(g) for g in own[rank]]) < 1e-14
    coefficients = {found["record"].clip_coefficient for found in results}
    assert len(coefficients) == 1
    assert coefficients.pop() < 1.0
