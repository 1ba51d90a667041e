"""Scalars: a record as numbers with the names that dashboards group by."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ..records import UpdateRecord

__all__ = ["scalars_of"]

# Fields that hold a number each: how the section goes on.
_NUMBERS = {
    "clip_max_norm": "train/clip_max_norm",
    "update_norm": "train/update_norm",
    "naive_update_norm": "train/naive_update_norm",
    "grad_largest": "train/grad_largest",
    "grad_zeros": "train/grad_zeros",
    "outlier_microbatch": "train/outlier_microbatch",
    "noise_scale": "train/noise_scale",
    "noise_scale_low": "train/noise_scale_low",
    "noise_scale_high": "train/noise_scale_high",
    "memory_bytes": "perf/memory_bytes",
}
# Fields that hold a number for each parameter: the section they make.
_BY_TENSOR = {
    "grad_norms": "grad_norm",
    "grad_zeros_by_tensor": "grad_zeros",
    "update_norms": "update_norm",
    "update_to_weight": "update_to_weight",
    "weight_norms": "weight_norm",
}


def scalars_of(record: UpdateRecord) -> dict[str, float]:
    """Give every number of a record a name of the form `section/what`.

    `train/loss`, `train/grad_norm`, `train/lr` and so on; `perf/...` for time and memory; and a
    section for each thing that is measured by tensor, such as `grad_norm/head.weight`. What a
    record does not hold is left out.

    Args:
        record: Of one update. Reads it: where it is still on an accelerator, that waits.

    Example:
        >>> from midstep.records import Verdict
        >>> record = UpdateRecord(
        ...     update=3, step=2, verdict=Verdict.APPLIED, num_microbatches=4,
        ...     denominators={"loss": 512}, loss_means={"loss": 2.5}, loss_mean=2.5, grad_norm=2.0,
        ...     clip_coefficient=0.5, clipped=True, lr=[3e-4], loss_scale=1.0, num_nonfinite=0,
        ...     seconds=0.125, extra={"grad_norms": {"weight": 2.0}})
        >>> scalars = scalars_of(record)
        >>> scalars["train/loss"], scalars["train/lr"], scalars["grad_norm/weight"]
        (2.5, 0.0003, 2.0)
        >>> scalars["perf/targets_per_second"]
        4096.0
    """
    known = dict(_of_update(record)) | dict(_of_extra(record.extra))
    return {name: float(value) for name, value in known.items() if value is not None}


def _of_update(record: UpdateRecord) -> Iterator[tuple[str, float | None]]:
    yield "train/loss", record.loss_mean
    if len(record.loss_means) > 1:
        for term, mean in record.loss_means.items():
            yield f"train/loss_{term}", mean
    yield "train/grad_norm", record.grad_norm
    yield "train/clip_coefficient", record.clip_coefficient
    yield "train/clipped", record.clipped
    yield "train/applied", record.applied
    yield "train/num_nonfinite", record.num_nonfinite
    yield "train/loss_scale", record.loss_scale
    yield "train/step", record.step
    yield "train/num_microbatches", record.num_microbatches
    if len(set(record.lr)) == 1:
        yield "train/lr", record.lr[0]
    else:
        for index, lr in enumerate(record.lr):
            yield f"train/lr_group{index}", lr
    for term, count in record.denominators.items():
        yield "train/targets" if len(record.denominators) == 1 else f"train/targets_{term}", count
    first = next(iter(record.denominators.values()), 0)
    if record.seconds > 0:
        yield "perf/targets_per_second", first / record.seconds
    yield "perf/seconds", record.seconds


def _of_extra(extra: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    for field, name in _NUMBERS.items():
        yield name, extra.get(field)
    for index, norm in enumerate(extra.get("grad_norms_by_group", ())):
        yield f"grad_norm_by_group/{index}", norm
    for stage, seconds in extra.get("stage_seconds", {}).items():
        yield f"perf/seconds_{stage}", seconds
    norms = [norm for norm in extra.get("microbatch_grad_norms", ()) if norm is not None]
    if norms and not any(math.isnan(norm) for norm in norms):
        yield "train/microbatch_grad_norm_min", min(norms)
        yield "train/microbatch_grad_norm_max", max(norms)
    for field, section in _BY_TENSOR.items():
        for name, value in extra.get(field, {}).items():
            yield f"{section}/{name}", value
    for name, moments in extra.get("moments", {}).items():
        yield f"moment_first/{name}", moments.get("first")
        yield f"moment_second/{name}", moments.get("second")
