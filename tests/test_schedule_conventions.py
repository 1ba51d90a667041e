"""What schedules come to, against sums taken by hand and torch's own schedulers."""

import math

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from midstep.schedules import cosine, linear
from midstep.schedules.conventions import Family, Wish
from midstep.schedules.facts import Facts


def test_the_area_and_ends_of_a_triangle_are_those_of_a_triangle() -> None:
    facts = Facts.of(linear(total=10, warmup=4), 10)
    assert (facts.first, facts.peak, facts.last, facts.after) == (0.25, 1.0, 0.0, 0.0)
    assert (facts.peak_update, facts.minimum_update) == (4, 10)
    assert facts.area == pytest.approx((1 + 2 + 3 + 4) / 4 + (5 + 4 + 3 + 2 + 1 + 0) / 6)


def test_ours_uses_peak_and_minimum_and_no_update_runs_at_rate_0() -> None:
    facts = Facts.of(cosine(total=100, warmup=10, minimum=0.1), 100)
    assert (facts.first, facts.peak, facts.peak_update) == (0.1, 1.0, 10)
    assert facts.last == facts.minimum == facts.after == 0.1
    assert facts.minimum_update == 100


def test_the_convention_of_torch_is_what_torch_does() -> None:
    wish = Wish(family=Family.COSINE, total=30, warmup=6, minimum=0.1)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = SequentialLR(
        optimizer,
        [
            LinearLR(optimizer, start_factor=1 / 3, total_iters=6),
            CosineAnnealingLR(optimizer, T_max=24, eta_min=0.1),
        ],
        milestones=[6],
    )
    rates = []
    for _ in range(30):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    ours = wish.conventions()["torch"]
    assert [ours(step) for step in range(30)] == pytest.approx(rates, abs=1e-12)


@pytest.mark.parametrize("family", list(Family))
def test_every_family_has_its_own_first_and_peers_that_rise_to_about_the_peak(
    family: Family,
) -> None:
    wish = Wish(family=family, total=100, warmup=10, stable=50, minimum=0.1)
    found = wish.conventions()
    assert next(iter(found)) == "midstep"
    for schedule in found.values():
        facts = Facts.of(schedule, 100)
        assert 0.97 < facts.peak <= 1.0
        assert abs(facts.peak_update - 10) <= 1
        assert facts.area == pytest.approx(math.fsum(schedule(s) for s in range(100)))
