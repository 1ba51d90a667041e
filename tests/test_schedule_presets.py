"""Presets against published vectors, and against torch's own schedulers run side by side."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
)

from midstep.schedules import Factor, Scaled, linear, presets, shapes, warmup_stable_decay

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parent / "data" / "schedules.json").read_text())["cases"]
}

WSD = {"warmup": 4, "stable": 3, "decay": 5}
MADE_AS: dict[str, Factor] = {
    "hf.linear": presets.hf_linear(total=12, warmup=4),
    "hf.cosine": presets.hf_cosine(total=12, warmup=4),
    "hf.cosine_warmup_min_lr": presets.hf_cosine_warmup_with_min_lr(
        total=12, warmup=4, minimum=0.1
    ),
    "hf.polynomial": presets.hf_polynomial(total=12, warmup=4, minimum=0.1, power=2),
    "hf.inverse_sqrt": presets.hf_inverse_sqrt(warmup=4),
    "hf.wsd.linear": presets.hf_wsd(**WSD, minimum=0.1, shape=shapes.Linear()),
    "hf.wsd.1-sqrt": presets.hf_wsd(**WSD, minimum=0.1, shape=shapes.Sqrt()),
    "torch.seq_linear_cosine": presets.torch_warmup_cosine(
        total=12, warmup=4, start=0.25, minimum=0.1
    ),
    "torch.onecycle.cos": presets.torch_one_cycle(total=12),
    "torch.onecycle.linear": presets.torch_one_cycle(total=12, shape=shapes.Linear()),
    "torch.onecycle.cos.3phase": presets.torch_one_cycle(total=12, three_phase=True),
    "torch.polynomial": presets.torch_polynomial(total=12, power=2),
    "torch.warm_restarts": presets.torch_warm_restarts(first=4),
    "timm.cosine.prefix_False": presets.timm_cosine(total=12, warmup=4, start=0.01, minimum=0.1),
    "timm.wsd": presets.timm_wsd(**WSD, minimum=0.1, shape=shapes.Sqrt()),
    "optax.warmup_cosine": presets.optax_warmup_cosine(total=12, warmup=4, minimum=0.1),
    "optax.onecycle.cosine": presets.optax_one_cycle(total=12),
    "optax.polynomial": presets.optax_polynomial(
        transition_begin=4, transition_steps=8, minimum=0.1, power=2
    ),
    "d2l.cosine": presets.d2l_cosine(total=12, warmup=4, minimum=0.1),
    "nanogpt.cosine": presets.nanogpt_cosine(total=12, warmup=4, minimum=0.1),
    "torchtitan.wsd.cosine": presets.torchtitan_wsd(**WSD, minimum=0.1, shape=shapes.Cosine()),
    "torchtitan.wsd.sqrt": presets.torchtitan_wsd(**WSD, minimum=0.1, shape=shapes.Sqrt()),
    "megatron.cosine": presets.megatron(total=12, warmup=4, minimum=0.1),
    "megatron.inverse-square-root": presets.megatron_inverse_sqrt(total=12, warmup=4, minimum=0.1),
    "megatron.WSD.linear": presets.megatron(
        total=12, warmup=4, stable=3, minimum=0.1, shape=shapes.Linear()
    ),
    "megatron.WSD.minus_sqrt": presets.megatron(
        total=12, warmup=4, stable=3, minimum=0.1, shape=shapes.Sqrt()
    ),
    "fairseq.inverse_sqrt": presets.fairseq_inverse_sqrt(warmup=4),
    "noam": presets.noam(width=512, warmup=4),
    "fastai.onecycle": presets.fastai_one_cycle(total=12),
    "proposed.linear": linear(total=12, warmup=4, minimum=0.1),
    "proposed.1-sqrt.wsd": warmup_stable_decay(
        total=12, warmup=4, stable=3, minimum=0.1, shape=shapes.Sqrt()
    ),
}


def torch_rates(
    make: Callable[[Optimizer], LRScheduler], num_updates: int, base: float = 1.0
) -> list[float]:
    """The rates that torch's scheduler lets each update use."""
    parameter = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = SGD([parameter], lr=base)
    scheduler = make(optimizer)
    rates = []
    for _ in range(num_updates):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def test_every_published_vector_is_made_by_something() -> None:
    assert list(MADE_AS) == list(CASES)
    assert len(CASES) == 31


@pytest.mark.parametrize("name", CASES)
def test_a_published_vector_is_reproduced(name: str) -> None:
    case = CASES[name]
    factors = [MADE_AS[name](step) for step in case["inputs"]["steps"]]
    tolerance = {"rel": case["tol"]["rtol"], "abs": case["tol"]["atol"]}
    assert factors == pytest.approx(case["expected"]["lr"], **tolerance)


@pytest.mark.parametrize("name", ["cos", "linear", "cos.3phase"])
def test_one_cycle_answers_one_step_past_its_end_as_torch_does_and_then_raises(name: str) -> None:
    (crosscheck,) = CASES[f"torch.onecycle.{name}"]["crosscheck"]
    *values, error = crosscheck["peer_values"]
    schedule = MADE_AS[f"torch.onecycle.{name}"]
    assert [schedule(step) for step in range(13)] == pytest.approx(values, rel=1e-9, abs=1e-12)
    assert error == "ValueError"
    with pytest.raises(ValueError, match=r"`step=13` is past `total=12`.*no rate.*Stop there"):
        schedule(13)


@pytest.mark.parametrize("three_phase", [False, True])
@pytest.mark.parametrize("strategy", ["cos", "linear"])
@pytest.mark.parametrize(("total", "peak"), [(12, 0.3), (50, 0.1), (7, 0.45), (100, 0.25)])
def test_one_cycle_is_the_one_of_torch(
    total: int, peak: float, strategy: str, three_phase: bool
) -> None:
    def of_torch(optimizer: Optimizer) -> OneCycleLR:
        return OneCycleLR(
            optimizer,
            max_lr=1.0,
            total_steps=total,
            pct_start=peak,
            anneal_strategy=strategy,  # type: ignore[arg-type]
            cycle_momentum=False,
            div_factor=10.0,
            final_div_factor=100.0,
            three_phase=three_phase,
        )

    schedule = presets.torch_one_cycle(
        total=total,
        peak=peak,
        start=1 / 10,
        minimum=1 / 1000,
        three_phase=three_phase,
        shape=shapes.Cosine() if strategy == "cos" else shapes.Linear(),
    )
    factors = [schedule(step) for step in range(total)]
    assert factors == pytest.approx(torch_rates(of_torch, total), rel=1e-9, abs=1e-12)


def test_a_one_cycle_whose_peak_lies_before_training_only_falls_as_in_torch() -> None:
    def of_torch(optimizer: Optimizer) -> OneCycleLR:
        return OneCycleLR(
            optimizer, max_lr=1.0, total_steps=12, pct_start=0.05, cycle_momentum=False
        )

    schedule = presets.torch_one_cycle(total=12, peak=0.05)
    factors = [schedule(step) for step in range(12)]
    assert factors == pytest.approx(torch_rates(of_torch, 12), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("total", "minimum"), [(1, 0.0), (8, 0.1), (13, 0.5)])
def test_cosine_is_the_one_of_torch_also_where_it_rises_again(total: int, minimum: float) -> None:
    rates = torch_rates(lambda optimizer: CosineAnnealingLR(optimizer, total, minimum), 3 * total)
    schedule = presets.torch_warmup_cosine(total=total, minimum=minimum)
    factors = [schedule(step) for step in range(3 * total)]
    assert factors == pytest.approx(rates, rel=1e-9, abs=1e-12)


# torch's own `SequentialLR` passes the epoch to `step`, which torch deprecates.
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize(("total", "warmup"), [(12, 4), (30, 1), (31, 10)])
def test_warmup_and_cosine_are_the_ones_of_torch(total: int, warmup: int) -> None:
    def of_torch(optimizer: Optimizer) -> SequentialLR:
        rise = LinearLR(optimizer, start_factor=0.2, total_iters=warmup)
        fall = CosineAnnealingLR(optimizer, total - warmup, eta_min=0.03)
        return SequentialLR(optimizer, [rise, fall], milestones=[warmup])

    schedule = presets.torch_warmup_cosine(total=total, warmup=warmup, start=0.2, minimum=0.1)
    rates = [0.3 * schedule(step) for step in range(total + 8)]
    assert rates == pytest.approx(torch_rates(of_torch, total + 8, 0.3), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.5])
def test_polynomial_is_the_one_of_torch(power: float) -> None:
    schedule = presets.torch_polynomial(total=9, power=power)
    rates = torch_rates(lambda optimizer: PolynomialLR(optimizer, 9, power), 15)
    # torch multiplies step by step; the closed form does not drift.
    assert [schedule(step) for step in range(15)] == pytest.approx(rates, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("growth", [1, 2, 3])
def test_warm_restarts_are_the_ones_of_torch(growth: int) -> None:
    schedule = presets.torch_warm_restarts(first=5, growth=growth, minimum=0.1)
    rates = torch_rates(
        lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 5, growth, eta_min=0.1), 300
    )
    assert [schedule(step) for step in range(300)] == pytest.approx(rates, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("start", "end"), [(1 / 3, 1.0), (0.1, 1.0), (1.0, 0.2)])
def test_linear_is_the_one_of_torch(start: float, end: float) -> None:
    schedule = presets.torch_linear(total=7, start=start, end=end)
    rates = torch_rates(lambda optimizer: LinearLR(optimizer, start, end, 7), 12)
    assert [schedule(step) for step in range(12)] == pytest.approx(rates, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: LinearLR(optimizer, start_factor=0.1, total_iters=3),
        lambda optimizer: LambdaLR(optimizer, presets.torch_linear(total=3, start=0.1)),
    ],
    ids=["torch", "midstep"],
)
@pytest.mark.parametrize(
    ("steps_first", "percent"), [(True, [40, 70, 100, 100]), (False, [10, 40, 70, 100])]
)
# Before the optimizer ever stepped, torch says that the first rate is lost: the claim of this test.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_stepping_at_the_start_of_an_epoch_loses_the_first_rate(
    make: Callable[[Optimizer], LRScheduler], steps_first: bool, percent: list[int]
) -> None:
    optimizer = SGD([torch.zeros((), requires_grad=True)], lr=1.0)
    scheduler, used = make(optimizer), []
    for _ in range(4):
        if steps_first:
            scheduler.step()
        used.append(100 * float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if not steps_first:
            scheduler.step()
    assert used == pytest.approx(percent)


def test_a_cosine_from_three_tenths_to_a_hundredth_is_halfway_at_half_time() -> None:
    rate = Scaled(schedule=presets.d2l_cosine(total=20, minimum=0.01 / 0.3), by=0.3)
    assert [rate(0), rate(10), rate(20), rate(21)] == pytest.approx([0.3, 0.155, 0.01, 0.01])


def test_conventions_that_agree_compare_equal() -> None:
    plan = {"total": 12, "warmup": 4, "minimum": 0.1}
    assert presets.optax_warmup_cosine(**plan) == presets.d2l_cosine(**plan)  # type: ignore[arg-type]
    assert presets.d2l_cosine(**plan) == presets.megatron(**plan)  # type: ignore[arg-type]
    assert presets.d2l_cosine(**plan) != presets.nanogpt_cosine(**plan)  # type: ignore[arg-type]


def test_a_cosine_of_timm_that_waits_for_the_warmup_has_no_jump() -> None:
    waits = presets.timm_cosine(total=16, warmup=4, minimum=0.1, runs_in_warmup=False)
    assert waits == presets.d2l_cosine(total=16, warmup=4, minimum=0.1)
