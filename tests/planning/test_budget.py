"""Recompute by a measured budget: as few blocks as fit, and the same gradient."""

import pytest
import torch
from torch import nn

from midstep.planning import peak_of, recompute_within
from midstep.recomputing import recompute

ROWS = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 8))
            for _ in range(8)
        )
    )


def loss(model: nn.Module) -> torch.Tensor:
    return model(ROWS).square().sum()


def held(model: nn.Module) -> int:
    model.zero_grad()
    return peak_of(lambda: loss(model).backward(), torch.device("cpu")).num_bytes


def test_the_fewest_blocks_that_fit_are_run_again() -> None:
    whole = held(deep())
    all_of_them = deep()
    recompute(all_of_them)
    least = held(all_of_them)
    assert least < whole
    numbers = []
    for share in (0.25, 0.5, 0.75, 1.0):
        budget = int(least + share * (whole - least))
        model = deep()
        handle = recompute_within(model, loss, budget)
        assert held(model) <= budget
        numbers.append(0 if handle is None else len(handle.names))
        if handle is not None and len(handle.names) > 1:  # one block fewer does not fit
            handle.remove()
            recompute(model, blocks=list(model)[: numbers[-1] - 1])
            assert held(model) > budget
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[-1] == 0
    assert numbers[0] > numbers[2] > 0


def test_a_model_within_its_budget_has_the_same_gradient_and_draws() -> None:
    plain, ours = deep(), deep()
    handle = recompute_within(ours, loss, int(0.7 * held(deep())))
    assert handle is not None
    for model in (plain, ours):
        torch.manual_seed(3)
        model.zero_grad()
        loss(model).backward()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_measuring_leaves_random_state_and_no_gradient() -> None:
    budget = held(deep()) // 2
    model = deep()
    before = torch.get_rng_state()
    recompute_within(model, loss, budget)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())


def test_a_budget_that_nothing_fits_is_refused_with_the_least_that_was_held() -> None:
    model = deep()
    with pytest.raises(ValueError, match=r"the least .* held was [\d,]+ bytes"):
        recompute_within(model, loss, 1000)
    assert not any(module._forward_hooks for module in model.modules())
