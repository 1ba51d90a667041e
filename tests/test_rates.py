"""The schedule ticks after the optimizer, on applied updates only, from its first value."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_loop import Pair, classifier, loss_sum, pairs
from torch.optim import lr_scheduler as torch_schedules

import midstep as ms

GOOD = pairs(3, dtype=torch.float32)
BAD = [(torch.full((2, 4), math.inf), torch.tensor([0, 1]))]
Make = Callable[[torch.optim.Optimizer], Any]

TORCH: dict[str, Make] = {
    "StepLR": lambda o: torch_schedules.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: torch_schedules.MultiStepLR(o, [2, 4], 0.1),
    "LambdaLR": lambda o: torch_schedules.LambdaLR(o, lambda step: 1.0 / (step + 1)),
    "MultiplicativeLR": lambda o: torch_schedules.MultiplicativeLR(o, lambda _: 0.9),
    "ConstantLR": lambda o: torch_schedules.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: torch_schedules.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: torch_schedules.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: torch_schedules.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: torch_schedules.CosineAnnealingLR(o, 5),
    "Restarts": lambda o: torch_schedules.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: torch_schedules.OneCycleLR(o, 0.4, total_steps=12),
    "CyclicLR": lambda o: torch_schedules.CyclicLR(o, 0.01, 0.3, step_size_up=3),
    "SequentialLR": lambda o: torch_schedules.SequentialLR(
        o,
        [torch_schedules.LinearLR(o, 0.1, total_iters=3), torch_schedules.CosineAnnealingLR(o, 5)],
        [3],
    ),
    "ChainedScheduler": lambda o: torch_schedules.ChainedScheduler(
        [torch_schedules.ConstantLR(o, 0.5, 3), torch_schedules.ExponentialLR(o, 0.9)], o
    ),
}


def sgd(lr: Any = 0.1) -> tuple[Any, torch.optim.SGD]:
    model = classifier(torch.float32)
    groups: list[dict[str, Any]] = [
        {"params": list(model[0].parameters()), "lr": lr},
        {"params": list(model[2].parameters())},
    ]
    return model, torch.optim.SGD(groups, lr=0.02, momentum=0.9)


def update(updater: ms.Updater, batches: list[Pair]) -> ms.UpdateRecord:
    return updater.update(batches, loss_sum, count=ms.targets())


@pytest.mark.parametrize("name", TORCH)
def test_the_rates_are_those_of_a_plain_loop_and_skipped_updates_do_not_move_them(
    name: str,
) -> None:
    _, theirs = sgd()
    schedule = TORCH[name](theirs)
    expected = []
    for _ in range(6):
        expected.append([group["lr"] for group in theirs.param_groups])
        theirs.step()
        schedule.step()
    model, optimizer = sgd()
    updater = ms.Updater(
        model, optimizer, schedule=TORCH[name](optimizer), nonfinite=ms.Skip(), empty=ms.Skip()
    )
    masked = [(GOOD[0][0], torch.full_like(GOOD[0][1], -100))]
    found = []
    for index in range(6):
        for batches in (BAD, masked) if index % 2 else ():
            assert not update(updater, batches).applied
        record = update(updater, GOOD)
        assert record.applied
        found.append(record.lr)
    assert found == expected  # to the last bit: the first update with the first value


@pytest.mark.parametrize("name", TORCH)
def test_the_state_of_a_schedule_is_saved_and_goes_on(name: str) -> None:
    def made() -> ms.Updater:
        model, optimizer = sgd()
        return ms.Updater(model, optimizer, schedule=TORCH[name](optimizer))

    whole = made()
    expected = [update(whole, GOOD).lr for _ in range(6)]
    first = made()
    for _ in range(3):
        update(first, GOOD)
    second = made()
    second.load_state_dict(first.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert [update(second, GOOD).lr for _ in range(3)] == expected[3:]


def test_a_function_of_the_step_is_a_factor_on_each_base_rate() -> None:
    model, optimizer = sgd()
    updater = ms.Updater(model, optimizer, schedule=lambda step: 0.5**step, nonfinite=ms.Skip())
    assert update(updater, GOOD).lr == [0.1, 0.02]
    update(updater, BAD)
    assert update(updater, GOOD).lr == [0.05, 0.01]
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.005]


def test_a_function_that_begins_low_is_low_from_the_first_update() -> None:
    model, optimizer = sgd()
    updater = ms.Updater(model, optimizer, schedule=lambda step: min(1.0, (step + 1) / 4))
    assert [update(updater, GOOD).lr[0] for _ in range(5)] == pytest.approx(
        [0.025, 0.05, 0.075, 0.1, 0.1]
    )


@pytest.mark.parametrize("kind", ["function", "StepLR"])
def test_a_rate_kept_as_a_tensor_is_moved_in_place(kind: str) -> None:
    rate = torch.tensor(0.1, dtype=torch.float64)
    model, optimizer = sgd(rate)
    schedule: Any = (lambda step: 0.5**step) if kind == "function" else None
    if schedule is None:
        schedule = torch_schedules.StepLR(optimizer, 1, 0.5)
    updater = ms.Updater(model, optimizer, schedule=schedule)
    found = [update(updater, GOOD).lr[0] for _ in range(3)]
    assert found == pytest.approx([0.1, 0.05, 0.025])
    assert all(isinstance(value, float) for value in found)
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    if kind == "function":
        assert optimizer.param_groups[0]["lr"] is rate  # captured graphs hold on to it


def test_a_group_that_is_added_later_follows_a_function_of_the_step() -> None:
    model = classifier(torch.float32)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    for p in model[0].parameters():
        p.requires_grad_(False)
    updater = ms.Updater(model, optimizer, schedule=lambda step: 0.5**step)
    update(updater, GOOD)
    for p in model[0].parameters():
        p.requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.8})
    assert update(updater, GOOD).lr == [0.05, 0.8]
    assert update(updater, GOOD).lr == [0.025, pytest.approx(0.2)]


def test_without_a_schedule_the_rate_is_the_callers() -> None:
    model, optimizer = sgd()
    updater = ms.Updater(model, optimizer)
    update(updater, GOOD)
    optimizer.param_groups[0]["lr"] = 0.7
    assert update(updater, GOOD).lr == [0.7, 0.02]


def test_reduce_on_plateau_moves_with_its_metric_and_with_nothing_else() -> None:
    model, optimizer = sgd()
    schedule = torch_schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    updater = ms.Updater(model, optimizer, schedule=schedule)
    assert [update(updater, GOOD).lr[0] for _ in range(5)] == [0.1] * 5
    updater.report_metric(1.0)
    assert update(updater, GOOD).lr[0] == 0.1
    updater.report_metric(torch.tensor(2.0))  # type: ignore[arg-type] # any number will do
    assert type(updater.rates.state_dict()["best"]) is float  # which a checkpoint can keep
    assert update(updater, GOOD).lr == [0.05, 0.01]


@pytest.mark.parametrize("schedule", [None, lambda _: 1.0])
def test_a_metric_that_nobody_listens_to_is_refused(schedule: Any) -> None:
    model, optimizer = sgd()
    updater = ms.Updater(model, optimizer, schedule=schedule)
    with pytest.raises(ValueError, match="takes no metric"):
        updater.report_metric(1.0)


@pytest.mark.parametrize("name", [*TORCH, "ReduceLROnPlateau"])
def test_a_scheduler_of_another_optimizer_is_refused(name: str) -> None:
    model, optimizer = sgd()
    make: Make = TORCH.get(name, torch_schedules.ReduceLROnPlateau)
    with pytest.raises(ValueError, match="of another optimizer"):
        ms.Updater(model, optimizer, schedule=make(sgd()[1]))


def test_the_scheduler_is_stepped_after_the_optimizer() -> None:
    """torch warns of the other order, and warnings are errors here."""
    model, optimizer = sgd()
    schedule = torch_schedules.StepLR(optimizer, 1, 0.5)
    updater = ms.Updater(model, optimizer, schedule=schedule)
    order: list[str] = []
    optimizer.register_step_post_hook(lambda *_: order.append("optimizer"))
    tick = schedule.step
    schedule.step = lambda *a: (order.append("schedule"), tick(*a))[1]  # type: ignore[method-assign]
    update(updater, GOOD)
    assert order == ["optimizer", "schedule"]
