"""F13, F14, F19 and F20: what recompute keeps and costs, what a state takes, when ranks talk."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ..arithmetic import OptimizerKind, State, memory_of
from ..planning import measure_tradeoff
from ..recomputing import recompute
from ..updater import Updater
from .accumulation import gap, gradient_of
from .figure import Compute, Figure

__all__ = ["FIGURES"]


def _f13() -> Figure:
    torch.manual_seed(10)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2)).double()
    kept, control = copy.deepcopy(plain), copy.deepcopy(plain)
    x = torch.randn(5, 4, dtype=torch.float64)
    out, grads = _run(plain, x)
    with recompute(kept, blocks=[kept]):
        out_kept, grads_kept = _run(kept, x)
    out_control, grads_control = _run(
        lambda rows: checkpoint(control, rows, use_reentrant=False, preserve_rng_state=False),
        x,
        control,
    )
    found: dict[str, Any] = {
        "output_gap": gap([out], [out_kept]),
        "gradient_gap": gap(grads, grads_kept),
        "control_output_gap": gap([out], [out_control]),
        "control_gradient_gap": gap(grads, grads_control),
    }
    return Figure(
        id="F13",
        setup="recompute of a dropout block with and without preserved random state",
        published={
            "output_gap_below": 1e-12,
            "gradient_gap_below": 1e-12,
            "control_output_gap": 0.0,
            "control_gradients": "others",
        },
        computed=found,
        agrees=found["output_gap"] < 1e-12
        and found["gradient_gap"] < 1e-12
        and found["control_output_gap"] == 0.0
        and found["control_gradient_gap"] > 1e-6,
        note="`midstep.recompute` always keeps it; the control is torch's own without",
    )


def _f14() -> Figure:
    memory = memory_of(State(trainable=400_000_000, optimizer=OptimizerKind.ADAM))
    return Figure(
        id="F14",
        setup="400 million parameters, float32, two moments and gradients",
        published={"GB": 6.4},
        computed={"GB": memory.state_bytes / 1e9, "headroom_GB": memory.headroom.num_bytes / 1e9},
        agrees=memory.state_bytes == 6_400_000_000,
        note="before activations; headroom is a line of its own",
    )


def _f19() -> Figure:
    with _one_rank():
        deferred, each = _rounds(defers=True), _rounds(defers=False)
    return Figure(
        id="F19",
        setup="communication rounds of a DDP window of 8, with and without deferring",
        published={"without": 8, "with": 1},
        computed={"without": each, "with": deferred},
        agrees=(each, deferred) == (8, 1),
        note="counted where DDP hands a bucket over, in a group of one rank",
    )


def _f20() -> Figure:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(10)]
    model, x = nn.Sequential(*layers), torch.randn(256, 64)
    choices = [1, 2, 5, 10]
    plain, *rows = measure_tradeoff(
        model, lambda model: model(x).square().mean(), every=choices, blocks=layers
    )
    peaks = [row.peak_bytes / plain.peak_bytes for row in rows]
    return Figure(
        id="F20",
        setup="ten equal layers without recompute, and in segments of 1, 2, 5, 10",
        published={},
        computed={
            "peak_MB": [round(row.peak_bytes / 1e6, 3) for row in (plain, *rows)],
            "relative_time": [round(row.relative_time, 2) for row in (plain, *rows)],
            "gradient_gap": max(row.gradient_gap for row in rows),
            "model_parts": [row.model_parts for row in (plain, *rows)],
        },
        # Of the measurement only what must hold on any machine.
        agrees=all(row.gradient_gap == 0.0 for row in rows)
        and max(peaks) < 1.0
        and min(peaks) == min(peaks[:2]),
        note="measured here, no figure was promised: the gap is 0 and every segment saves memory",
    )


def _run(model: Any, x: Tensor, owner: nn.Module | None = None) -> tuple[Tensor, list[Tensor]]:
    rows = x.clone().requires_grad_()
    torch.manual_seed(11)
    out: Tensor = model(rows)
    out.square().sum().backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None
    return out.detach(), [rows.grad, *gradient_of(owner or model)]


def _rounds(*, defers: bool) -> int:
    """Count the buckets that DDP reduces in a window of 8 microbatches."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    rounds: list[int] = []
    # A lambda has no annotations: DDP refuses those whose evaluation is postponed.
    model.register_comm_hook(None, lambda _, bucket: _as_it_is(rounds, bucket))
    microbatches = list(torch.randn(8, 3, 4))
    if defers:
        updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1))
        updater.update(microbatches, lambda model, x: model(x).square().sum(), count=len)
    else:
        for x in microbatches:
            (model(x).square().sum() / 24).backward()
    return len(rounds)


def _as_it_is(rounds: list[int], bucket: Any) -> torch.futures.Future[Tensor]:
    rounds.append(bucket.index())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """Be a process group of one, or use the one that is there."""
    if dist.is_initialized():
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


FIGURES: list[Compute] = [_f13, _f14, _f19, _f20]
