"""Decay as an exponent, the effective batch, and what is advised when it changes."""

import math

import pytest
import torch
from torch import nn

import midstep as ms
from midstep.arithmetic import (
    DecayExponents,
    EffectiveBatch,
    Scaling,
    decay_factor,
    keep_exponent,
    scaled_rate,
)


def test_the_exponent_is_what_adamw_does_to_a_weight_whose_gradient_is_zero() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.1)
    exponents = DecayExponents()
    for _ in range(100):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        exponents.add([0.01], [0.1])
    assert weight.item() == pytest.approx(decay_factor([0.01] * 100, 0.1), rel=1e-12)
    assert math.exp(-exponents.totals[0]) == pytest.approx(weight.item(), rel=1e-4)


def test_without_a_gradient_there_is_no_decay() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.1)
    for _ in range(100):
        weight.grad = None
        optimizer.step()
    assert weight.item() == 1.0


def test_half_the_updates_need_twice_the_decay() -> None:
    original = decay_factor([0.01] * 100, 0.1)
    kept = keep_exponent(0.1, rate_sum=1.0, new_rate_sum=0.5)
    assert kept == pytest.approx(0.2)
    assert abs(original - decay_factor([0.01] * 50, kept)) < 1e-4
    assert abs(original - decay_factor([0.01] * 50, 0.05)) > 0.05


def test_a_rate_without_which_nothing_decays_is_refused() -> None:
    with pytest.raises(ValueError, match="rate_sum"):
        keep_exponent(0.1, rate_sum=1.0, new_rate_sum=0.0)


def test_groups_add_up_apart_and_one_that_joins_later_begins_at_zero() -> None:
    exponents = DecayExponents()
    exponents.add([0.1], [1.0])
    exponents.add([0.1, 0.2], [1.0, 1.0])
    assert exponents.totals == pytest.approx([0.2, 0.2])
    other = DecayExponents()
    other.load_state_dict(exponents.state_dict())
    other.add([0.1, 0.2], [0.0, 1.0])
    assert other.totals == pytest.approx([0.2, 0.4])
    assert exponents.totals == pytest.approx([0.2, 0.2])


def test_the_effective_batch_is_counted_in_targets_of_applied_updates() -> None:
    model = nn.Linear(4, 3)
    updater = ms.Updater(
        model, torch.optim.SGD(model.parameters(), lr=0.1), empty=ms.Skip(max_consecutive=3)
    )
    labels = [torch.tensor(y) for y in ([0, 1], [2, -100], [-100, -100], [-100, -100], [0, 0])]
    batches = [(torch.randn(2, 4), y) for y in labels]
    records = [
        updater.update(window, lambda m, b: ms.cross_entropy(m(b[0]), b[1]))
        for window in updater.windows(batches, size=2, count=ms.targets())
    ]
    assert [record.applied for record in records] == [True, False, True]
    batch = EffectiveBatch.of_records(records, nominal=4)
    assert (batch.mean, batch.smallest, batch.largest, batch.num_updates) == (2.5, 2, 3, 2)
    assert batch.share == 0.625


def test_a_run_without_an_applied_update_has_no_effective_batch() -> None:
    with pytest.raises(ValueError, match="No update"):
        EffectiveBatch.of_counts([])


@pytest.mark.parametrize(("scaling", "ratio"), [(Scaling.LINEAR, 4.0), (Scaling.SQUARE_ROOT, 2.0)])
def test_advice_keeps_the_exponent_and_names_its_condition(scaling: Scaling, ratio: float) -> None:
    advice = scaled_rate(scaling, lr=0.01, decay=0.1, batch=256, new_batch=1024, num_updates=1000)
    assert advice.lr == pytest.approx(0.01 * ratio)
    assert advice.lr * advice.decay * 250 == pytest.approx(0.01 * 0.1 * 1000)
    assert advice.exponent == pytest.approx(1.0)
    assert advice.exponent_unchanged == pytest.approx(0.25)
    assert scaling.condition in str(advice)


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="new_batch"):
        scaled_rate(Scaling.LINEAR, lr=0.1, decay=0.0, batch=1, new_batch=0, num_updates=1)
