"""Runs for the verdict: real small trainings, recorded as `midstep train` records them.

What observers measure is measured here by hand, from the gradients and the weights themselves, so
that the verdict is tested on figures that are true.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import midstep as ms

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Any]

SECONDS_PER_TARGET = 1e-4  # a clock of our own: on a shared machine the real one is noise


def cross_entropy(model: nn.Module, batch: Batch) -> ms.LossSum:
    return ms.cross_entropy(model(batch[0]), batch[1])


def squared(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) - batch[1]).square().sum()


def classes(
    rows: int = 16, seed: int = 0, num_features: int = 8, num_classes: int = 3
) -> Iterator[Batch]:
    """Rows whose class a linear map of them names, four times in five."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(num_features, num_classes, generator=generator)
    while True:
        x = torch.randn(rows, num_features, generator=generator)
        y = (x @ truth).argmax(1)
        is_wrong = torch.rand(rows, generator=generator) < 0.2
        y[is_wrong] = torch.randint(num_classes, (int(is_wrong.sum()),), generator=generator)
        yield x, y


def mlp(seed: int = 0, width: int = 32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
    )


def train(
    folder: Path,
    model: nn.Module,
    batches: Iterator[Batch],
    *,
    loss: Loss = cross_entropy,
    optimizer: torch.optim.Optimizer | None = None,
    updates: int = 120,
    size: int = 2,
    steps: int | None = None,
    before: Callable[[int], None] | None = None,
    own_clip: float | None = None,
    has_own_clock: bool = True,
    count: Any = None,
    **given: Any,
) -> Path:
    """Train, and write `updates.jsonl` and `run.json`.

    Args:
        folder: Where.
        model: What is trained.
        batches: Without end.
        loss: Sum over the batch.
        optimizer: AdamW at 0.003 by default.
        updates: How many are attempted.
        size: Microbatches of each.
        steps: How many were planned; as many by default.
        before: Called with the number of the update before its batches are read.
        own_clip: Clip once more before the step, behind the updater's back.
        has_own_clock: Whether `seconds` are computed instead of measured.
        count: As in `Updater.windows`.
        given: To the `Updater`.
    """
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    updater = ms.Updater(model, optimizer, **given)
    count = count or (ms.targets() if loss is cross_entropy else ms.elements())
    folder.mkdir(parents=True, exist_ok=True)
    with ms.JsonLines(folder / "updates.jsonl") as sink:
        for update in range(1, updates + 1):
            if before is not None:
                before(update)
            window = list(itertools.islice(batches, size))
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
            apart = microbatch_norms(model, window, loss) if given.get("precision") is None else {}
            record = one_update(updater, window, loss, count, own_clip)
            observed = apart | (tensors(model, weights, record) if record.applied else {})
            if has_own_clock:
                seconds = SECONDS_PER_TARGET * sum(record.denominators.values())
                record = dataclasses.replace(record, seconds=seconds)
            sink(dataclasses.replace(record, extra=observed))
    settings = {"steps": steps or updates, "clip": str(given.get("clip"))}
    settings["precision"] = str(given.get("precision") or ms.FP32())
    about = {"format": "midstep run", "schema": 1, "settings": settings}
    (folder / "run.json").write_text(json.dumps(about))
    return folder


def one_update(
    updater: ms.Updater, batches: Sequence[Batch], loss: Loss, count: Any, own_clip: float | None
) -> ms.UpdateRecord:
    if own_clip is None:
        return updater.update(batches, loss, count=count)
    records = []
    for window in updater.windows(batches, size=len(batches), count=count):
        for batch in window:
            window.backward(loss(updater.model, batch))
        window.gradients_()
        torch.nn.utils.clip_grad_norm_(updater.model.parameters(), own_clip)
        records.append(window.step())
    return records[0]


def tensors(
    model: nn.Module, before: dict[str, Tensor], record: ms.UpdateRecord
) -> dict[str, dict[str, float]]:
    """Norms by tensor of the gradient before clipping, and of the step against the weights."""
    parameters = {name: p for name, p in model.named_parameters() if p.grad is not None}
    factor = record.clip_coefficient or 1.0
    return {
        "grad_norms": {
            name: float(p.grad.double().norm()) / factor  # type: ignore[union-attr]
            for name, p in parameters.items()
        },
        "update_to_weight": {
            name: float((p.detach() - before[name]).norm() / before[name].norm().clamp(min=1e-12))
            for name, p in parameters.items()
        },
    }


def microbatch_norms(model: nn.Module, window: Sequence[Batch], loss: Loss) -> dict[str, Any]:
    """The norm of each microbatch's own gradient, and which stands out."""
    norms = []
    state = torch.get_rng_state()
    modules = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    kept = [{k: v.clone() for k, v in m.state_dict().items()} for m in modules]
    for batch in window:
        value = loss(model, batch)
        loss_sum = value.sum if isinstance(value, ms.LossSum) else value
        parameters = [p for p in model.parameters() if p.requires_grad]
        found = torch.autograd.grad(loss_sum, parameters, allow_unused=True)
        norms.append(
            math.sqrt(sum(float(g.double().square().sum()) for g in found if g is not None))
        )
    for module, values in zip(modules, kept, strict=True):
        module.load_state_dict(values)
    torch.set_rng_state(state)
    outlier = max(range(len(norms)), key=norms.__getitem__) + 1
    return {"microbatch_grad_norms": norms, "outlier_microbatch": outlier}
