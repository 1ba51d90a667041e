"""The verdict on runs whose fault is known: the right lines, and no other."""

import csv
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_records import record_of
from torch import Tensor, nn
from trained_runs import Batch, classes, cross_entropy, mlp, squared, train

import midstep as ms
from midstep.report import Finding, judge, read


def found_in(path: Path, **given: Any) -> dict[str, Finding]:
    return {finding.rule: finding for finding in judge(read(path, **given)).findings}


def with_batch(number: int, batch: Callable[[Batch], Batch], batches: Iterator[Batch]) -> Any:
    """Put another batch in the place of one of them, counted from 1."""
    for index, usual in enumerate(batches, start=1):
        yield batch(usual) if index == number else usual


# -- clipping -------------------------------------------------------------------------------------


def plain_log(path: Path, *, max_norm: float, after: bool, lr: float = 0.05) -> Path:
    """A loop of plain torch that logs the norm after, or before, it clipped it."""
    model, batches = mlp(), classes()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with path.open("w", newline="") as file:
        log = csv.writer(file)
        log.writerow(["step", "train/loss", "train/grad_norm", "train/learning_rate"])
        for step in range(1, 101):
            x, y = next(batches)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            if after:
                norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters())
            log.writerow([step, loss.item(), norm.item(), lr])
            optimizer.step()
    return path


def test_a_norm_logged_after_clipping_is_told_from_the_pile_at_the_threshold(
    tmp_path: Path,
) -> None:
    found = found_in(plain_log(tmp_path / "log.csv", max_norm=0.4, after=True))
    assert list(found) == ["norm-after-clipping"]
    assert found["norm-after-clipping"].figures["level"] == pytest.approx(0.4, rel=1e-4)
    assert "not in this log" in found["norm-after-clipping"].seen


def test_a_norm_logged_before_clipping_is_not_called_pinned(tmp_path: Path) -> None:
    path = plain_log(tmp_path / "log.csv", max_norm=0.4, after=False)
    assert found_in(path) == {}
    assert list(found_in(path, max_norm=0.4)) == ["clipped-often"]


def test_a_norm_that_really_lies_on_the_threshold_is_not_called_a_mistake_of_the_log(
    tmp_path: Path,
) -> None:
    folder = train(tmp_path, mlp(), classes(), own_clip=0.1, clip=ms.ByGlobalNorm(0.1))
    found = found_in(folder)
    assert list(found) == ["norm-on-threshold"]
    assert "really" in found["norm-on-threshold"].title


def test_norms_that_lie_on_the_threshold_are_found_below_larger_ones(tmp_path: Path) -> None:
    records = [
        record_of(update=n, step=n, grad_norm=0.5 if n % 3 else 0.5 + n % 7 / 20, clipped=False)
        for n in range(1, 101)
    ]
    path = tmp_path / "updates.jsonl"
    path.write_text("".join(record.to_json() + "\n" for record in records))
    (tmp_path / "run.json").write_text(
        '{"format": "midstep run", "settings": {"clip": "ByGlobalNorm(max_norm=0.5, p=2.0)"}}'
    )
    assert list(found_in(path)) == ["norm-on-threshold"]


@pytest.mark.parametrize(
    ("max_norm", "rules", "words"),
    [
        (0.01, ["clipped-always"], "always, 100 %"),
        (0.45, ["clipped-often"], "often, "),
        (0.6, [], "sometimes, "),
        (0.85, [], "rarely, "),
        (50.0, [], "never"),
    ],
)
def test_how_often_the_clip_fired_is_said_and_above_half_it_is_found(
    tmp_path: Path, max_norm: float, rules: list[str], words: str
) -> None:
    folder = train(tmp_path, mlp(), classes(), clip=ms.ByGlobalNorm(max_norm))
    judgement = judge(read(folder))
    assert [finding.rule for finding in judgement.findings] == rules
    assert judgement.facts["clipped"].startswith(words)


def test_what_clipping_did_to_the_step_is_the_mean_of_threshold_over_norm(tmp_path: Path) -> None:
    folder = train(tmp_path, mlp(), classes(), clip=ms.ByGlobalNorm(0.01))
    records = [json.loads(line) for line in (folder / "updates.jsonl").read_text().splitlines()]
    mean = sum(0.01 / record["grad_norm"] for record in records) / len(records)
    figures = found_in(folder)["clipped-always"].figures
    assert figures["mean_coefficient"] == pytest.approx(mean)
    assert figures["threshold"] == pytest.approx(0.01)


# -- the norm -------------------------------------------------------------------------------------


def regression(seed: int = 0) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 8, generator=generator)
    return itertools.repeat((x, x.sum(1, keepdim=True)))


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(8, 1)


def test_a_rate_just_above_the_stable_one_makes_the_norm_grow(tmp_path: Path) -> None:
    x, y = next(regression())
    with_bias = torch.cat([x, torch.ones(64, 1)], 1)
    sharpest = float(torch.linalg.eigvalsh(2 * with_bias.T @ with_bias / 64)[-1])
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.08 / sharpest)  # 2 / sharpest is stable
    folder = train(tmp_path, model, itertools.repeat((x, y)), loss=squared, optimizer=optimizer)
    found = found_in(folder)
    assert list(found) == ["norm-grows", "update-ratio-too-large"]  # both are true
    assert found["norm-grows"].figures["ratio"] > 3
    assert "rises meanwhile" in found["norm-grows"].seen


def test_a_fitted_line_is_called_converged(tmp_path: Path) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    folder = train(tmp_path, model, regression(), loss=squared, optimizer=optimizer, updates=200)
    found = found_in(folder)
    assert list(found) == ["norm-near-zero-converged"]


class Gated(nn.Module):
    """A model whose output loses its gradient when the gate is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = mlp(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.gate


def test_a_model_cut_off_from_its_loss_is_called_frozen(tmp_path: Path) -> None:
    model = Gated()

    def shut(update: int) -> None:
        model.gate = float(update < 60)

    found = found_in(train(tmp_path, model, classes(), before=shut))
    assert list(found) == ["norm-near-zero-frozen"]
    assert found["norm-near-zero-frozen"].updates == (60, 120)


def test_labels_that_are_all_masked_are_told_by_a_loss_of_exactly_zero(tmp_path: Path) -> None:
    def batches() -> Iterator[Batch]:
        for number, (x, y) in enumerate(classes()):
            yield x, (y if number < 120 else torch.full_like(y, -100))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    optimizer_of = torch.optim.SGD  # AdamW would go on moving by momentum
    model = mlp()
    folder = train(
        *(tmp_path, model, batches()),
        loss=loss,
        optimizer=optimizer_of(model.parameters(), lr=0.1),
        count=ms.rows(),
    )
    found = found_in(folder)
    assert list(found) == ["norm-near-zero-masked"]
    assert found["norm-near-zero-masked"].updates[0] == 61


def test_a_tiny_loss_scale_is_named_with_the_underflow_it_causes(tmp_path: Path) -> None:
    precision = ms.FP16(init_scale=2.0**-22, growth_interval=10_000)
    folder = train(tmp_path, mlp(), classes(), precision=precision)
    found = found_in(folder)
    assert list(found) == ["loss-scale-collapse", "norm-near-zero-underflow"]
    assert "at most" in found["loss-scale-collapse"].title


# -- spikes ---------------------------------------------------------------------------------------


def test_a_bad_batch_is_a_lone_spike_and_its_microbatch_is_named(tmp_path: Path) -> None:
    # The second microbatch of update 70.
    batches = with_batch(140, lambda batch: (batch[0] * 60, (batch[1] + 1) % 3), classes())
    folder = train(tmp_path, mlp(), batches, clip=ms.ByGlobalNorm(2.0))
    found = found_in(folder)
    assert list(found) == ["lone-spikes"]
    assert found["lone-spikes"].figures["update"] == 70
    assert found["lone-spikes"].figures["microbatch"] == 2
    assert found["lone-spikes"].updates == (70, 70)
    assert "microbatch 2 of 2" in found["lone-spikes"].seen


def test_a_spike_that_was_skipped_is_said_to_have_changed_nothing(tmp_path: Path) -> None:
    batches = with_batch(140, lambda batch: (batch[0] * 60, (batch[1] + 1) % 3), classes())
    folder = train(tmp_path, mlp(), batches, clip=ms.SkipSpike(sigma=8.0), steps=119)
    found = found_in(folder)
    assert list(found) == ["lone-spikes"]
    assert "not applied" in found["lone-spikes"].seen


def test_a_run_that_never_came_back_from_a_spike_is_not_called_a_lone_spike(
    tmp_path: Path,
) -> None:
    batches = with_batch(140, lambda batch: (batch[0] * 1000, (batch[1] + 1) % 3), classes(64))
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = found_in(train(tmp_path, model, batches, optimizer=optimizer))
    assert "drift-after-spike" in found
    assert "lone-spikes" not in found
    assert found["drift-after-spike"].figures["update"] == 70


# -- skips ----------------------------------------------------------------------------------------


def test_a_loss_scale_that_halves_without_end_has_collapsed(tmp_path: Path) -> None:
    def batches() -> Iterator[Batch]:
        for number, (x, y) in enumerate(classes()):
            yield (x if number < 120 else x * 1e30), y  # inf in fp16, whatever the scale

    folder = train(
        *(tmp_path, mlp(), batches()),
        precision=ms.FP16(init_scale=2.0**10),
        nonfinite=ms.Skip(max_consecutive=1000),
        updates=80,
        steps=60,
    )
    found = found_in(folder)
    assert list(found) == ["loss-scale-collapse"]
    assert found["loss-scale-collapse"].figures["overflows"] == 20


def test_the_search_of_a_loss_scale_for_its_size_is_no_fault(tmp_path: Path) -> None:
    precision = ms.FP16(init_scale=2.0**24)
    folder = train(
        tmp_path, mlp(), classes(), precision=precision, nonfinite=ms.Skip(max_consecutive=20)
    )
    run = read(folder)
    assert run.skipped["skipped_nonfinite"] >= 3
    assert [f.rule for f in judge(run).findings if f.rule != "stopped-early"] == []


def test_several_skipped_updates_in_a_row_are_counted_with_their_reason(tmp_path: Path) -> None:
    def batches() -> Iterator[Batch]:
        for number, (x, y) in enumerate(classes()):
            yield (x * math.nan if 100 <= number < 108 else x), y

    folder = train(tmp_path, mlp(), batches(), nonfinite=ms.Skip(max_consecutive=5), steps=116)
    found = found_in(folder)
    assert list(found) == ["skipped-in-a-row"]
    assert found["skipped-in-a-row"].figures["in_a_row"] == 4
    assert found["skipped-in-a-row"].updates == (51, 54)
    assert "4 nonfinite" in found["skipped-in-a-row"].seen


def test_a_log_of_a_loop_that_broke_ends_in_no_numbers(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    plain_log(path, max_norm=math.inf, after=False, lr=3e4)
    found = found_in(path)
    assert "not-finite" in found
    with path.open(newline="") as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file)]
    first = next(i for i, loss in enumerate(losses, start=1) if not math.isfinite(loss))
    assert found["not-finite"].updates[0] <= first


# -- layers ---------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A model whose last layer sees features a hundred times as large as the others do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Linear(32, 3)
        with torch.no_grad():
            self.head.weight.div_(100)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(100 * self.body(x))


def test_a_layer_that_carries_the_norm_is_named_with_its_share(tmp_path: Path) -> None:
    model = Scaled()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    found = found_in(train(tmp_path, model, classes(), optimizer=optimizer))
    assert list(found) == ["one-layer-carries-the-norm"]
    assert found["one-layer-carries-the-norm"].figures["tensor"] == "head.weight"


class Branched(nn.Module):
    """Two branches, of which one is cut by a ReLU that never fires."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.live, self.dead = mlp(), nn.Linear(8, 3)
        with torch.no_grad():
            self.dead.bias.fill_(-100.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.live(x) + self.dead(x).relu()


def test_dead_layers_are_named(tmp_path: Path) -> None:
    model = Branched()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    found = found_in(train(tmp_path, model, classes(), optimizer=optimizer))
    assert list(found) == ["dead-layers"]
    assert found["dead-layers"].figures["number"] == 2
    assert "`dead.weight`" in found["dead-layers"].seen


@pytest.mark.parametrize(
    ("group", "rule"),
    [({"lr": 0.3, "weight_decay": 1.0}, "too-large"), ({"lr": 1e-8}, "too-small")],
)
def test_a_layer_that_moves_too_much_or_not_at_all_is_named(
    tmp_path: Path, group: dict[str, float], rule: str
) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(
        [
            {"params": model[2].parameters(), **group},
            {"params": [*model[0].parameters(), *model[4].parameters()]},
        ],
        lr=0.003,
    )
    folder = train(tmp_path, model, classes(), optimizer=optimizer, clip=ms.ByGlobalNorm(100.0))
    found = found_in(folder)
    assert list(found) == [f"update-ratio-{rule}"]
    assert found[f"update-ratio-{rule}"].figures["worst"] == "2.weight"


# -- the course of a run --------------------------------------------------------------------------


def test_a_run_that_outlives_its_schedule_is_told_how_long(tmp_path: Path) -> None:
    schedule = ms.schedules.cosine(total=80, minimum=0.1)
    found = found_in(train(tmp_path, mlp(), classes(), schedule=schedule))
    assert list(found) == ["schedule-past-its-end"]
    assert found["schedule-past-its-end"].figures["updates"] == pytest.approx(41, abs=1)


def test_a_run_that_ends_before_its_plan_is_told_where(tmp_path: Path) -> None:
    schedule = ms.schedules.cosine(total=300)
    found = found_in(train(tmp_path, mlp(), classes(), schedule=schedule, steps=300))
    assert list(found) == ["stopped-early"]
    assert "120 of 300" in found["stopped-early"].seen


@pytest.mark.parametrize(
    ("schedule", "rules"),
    [
        (ms.schedules.linear(total=300), ["stopped-early"]),
        (ms.schedules.linear(total=120), []),
        (ms.schedules.cosine(total=120), []),
        (ms.schedules.inverse_sqrt(warmup=10), []),
        (lambda step: 0.99**step, []),
        (lambda step: 0.1 ** (step // 40), []),
        (lambda _: 1.0, []),
    ],
)
def test_without_a_plan_only_a_rate_that_is_still_falling_straight_is_called_early(
    tmp_path: Path, schedule: Any, rules: list[str]
) -> None:
    folder = train(tmp_path, mlp(), classes(), schedule=schedule)
    (folder / "run.json").unlink()
    assert list(found_in(folder)) == rules


def test_targets_that_swing_from_update_to_update_are_found(tmp_path: Path) -> None:
    def batches() -> Iterator[Batch]:
        for number, (x, y) in enumerate(classes(rows=32)):
            keep = 2 if number // 2 % 3 == 0 else 32
            few = y.clone()
            few[keep:] = -100
            yield x, few

    found = found_in(train(tmp_path, mlp(), batches()))
    assert list(found) == ["targets-swing"]
    assert found["targets-swing"].figures["low"] == 4
    assert found["targets-swing"].figures["high"] == 64


def test_a_batch_far_below_the_noise_scale_is_found(tmp_path: Path) -> None:
    # Labels that mean nothing, and few of them: the gradient is all noise. The two norms of
    # McCandlish et al. (2018), appendix A, over the whole run: of microbatches and of windows.
    model, labels = mlp(), torch.Generator().manual_seed(1)
    batches = ((x, torch.randint(3, y.shape, generator=labels)) for x, y in classes(rows=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    folder = train(tmp_path, model, batches, optimizer=optimizer, updates=400)
    path = folder / "updates.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    small = sum(
        sum((norm / 2) ** 2 for norm in record["microbatch_grad_norms"]) / 2 for record in records
    ) / len(records)
    large = sum(record["grad_norm"] ** 2 for record in records) / len(records)
    signal, noise = (4 * large - 2 * small) / 2, (small - large) / (1 / 2 - 1 / 4)
    scale = noise / max(signal, 1e-9)
    for record in records:
        record |= {"noise_scale": scale, "noise_scale_unit": "targets"}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = found_in(folder)
    assert scale > 30 * 4  # four targets an update
    assert list(found) == ["batch-below-noise-scale"]


def test_a_run_that_slows_down_is_found(tmp_path: Path) -> None:
    def nap(update: int) -> None:
        model.nap = 0.03 if update > 44 else 0.0

    class Sleepy(nn.Sequential):
        nap = 0.0

        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.003 + self.nap / 2)
            return super().forward(x)

    torch.manual_seed(0)
    model = Sleepy(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    folder = train(tmp_path, model, classes(), updates=56, before=nap, has_own_clock=False)
    found = found_in(folder)
    assert list(found) == ["throughput-sags"]
    assert found["throughput-sags"].figures["ratio"] < 0.5


# -- clean runs -----------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.view(len(x), 2, 4))[0][:, -1])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(2, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.inside(x.view(len(x), 4, 2))).mean(1))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv1d(1, 8, 3, padding=1),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 3))


def logistic() -> nn.Module:
    return nn.Linear(8, 3)


def deep() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(nn.Linear(8, 24), *layers, nn.Linear(24, 3))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 3))


def tokens() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 16), nn.Flatten(), nn.Linear(16 * 8, 3))


def token_batches() -> Iterator[Batch]:
    for x, y in classes():
        yield (x * 4 + 10).long().clamp(0, 19), y


def noisy_lines() -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(3)
    while True:
        x = torch.randn(16, 8, generator=generator)
        yield x, x.sum(1, keepdim=True) + torch.randn(16, 1, generator=generator)


CLEAN: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "mlp": (mlp, {}),
    "logistic": (logistic, {}),
    "convolutional": (convolutional, {"schedule": ms.schedules.cosine(total=120, warmup=10)}),
    "recurrent": (Recurrent, {"clip": ms.ByGlobalNorm(1.0)}),
    "attending": (Attending, {"schedule": ms.schedules.warmup_stable_decay(total=120, warmup=10)}),
    "normalised": (normalised, {"precision": ms.BF16()}),
    "deep": (deep, {"clip": ms.Adaptive(0.05)}),
    "dropping": (dropping, {"precision": ms.FP16()}),
    "tokens": (tokens, {"batches": token_batches}),
    "regression": (
        lambda: nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 1)),
        {"batches": noisy_lines, "loss": squared, "clip": ms.ByGlobalNorm(10.0)},
    ),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_run_raises_no_alarm(tmp_path: Path, name: str) -> None:
    make, given = CLEAN[name]
    torch.manual_seed(0)
    model = make()
    given = {"clip": ms.ByGlobalNorm(2.0), "loss": cross_entropy, **given}
    batches = given.pop("batches", classes)()
    folder = train(tmp_path / name, model, batches, **given)
    judgement = judge(read(folder))
    assert [finding.lines() for finding in judgement.findings] == []
    assert judgement.lines() == [f"{name}: nothing found in 120 updates"]
