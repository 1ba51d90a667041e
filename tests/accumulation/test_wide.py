"""Wide accumulation: float32 sums of half-precision gradients, rounded once."""

import math
from typing import Any

import pytest
import torch
from plain_loop import distance
from torch import Tensor, nn

import midstep as ms
from midstep.accumulation import Fused, Wide
from midstep.trial import trial

HALF = [torch.bfloat16, torch.float16]


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def rows(count: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 6, generator=generator).to(dtype) for _ in range(count)]


def loss_sum(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - 0.5).square().sum()


def summed_in_float64(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """The sum of the very gradients that the microbatches give in half precision."""
    total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    seed = torch.tensor(1.0 / (2 * len(batches)))
    for x in batches:
        model.zero_grad()
        loss_sum(model, x).backward(seed)
        torch._foreach_add_(total, [p.grad.double() for p in model.parameters()])
    model.zero_grad()
    return total


def error_of(found: list[Tensor], truth: list[Tensor]) -> float:
    """Root mean square of the differences, over that of the truth."""
    gap = math.sqrt(
        sum(float((a.double() - b).square().sum()) for a, b in zip(found, truth, strict=True))
    )
    return gap / math.sqrt(sum(float(b.square().sum()) for b in truth))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("count", [64, 1_000])
def test_a_sum_is_off_by_one_rounding_however_many_microbatches(
    dtype: torch.dtype, count: int
) -> None:
    batches = rows(count, dtype)
    errors = []
    for accumulation in (None, Wide()):
        model = model_of(dtype)
        truth = summed_in_float64(model, batches)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        updater = ms.Updater(model, optimizer, accumulation=accumulation)
        updater.update(batches, loss_sum, count=ms.rows())
        errors.append(error_of([p.grad for p in model.parameters()], truth))
    one_rounding = torch.finfo(dtype).eps / 2
    assert errors[1] < one_rounding
    assert errors[0] > (4 if count == 1_000 else 1.5) * one_rounding


def test_inside_a_window_the_sum_is_right_to_float32() -> None:
    batches = rows(64, torch.bfloat16)
    model = model_of(torch.bfloat16)
    truth = summed_in_float64(model, batches)
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.0), accumulation=Wide())
    for window in updater.windows(batches, size=64, count=ms.rows()):
        for x in window:
            window.backward(loss_sum(model, x))
        window.gradients_()
        assert all(p.grad.dtype is torch.float32 for p in model.parameters())
        assert error_of([p.grad for p in model.parameters()], truth) < 1e-6
        record = window.step()
    norm = math.sqrt(sum(float(t.square().sum()) for t in truth))
    assert record.grad_norm == pytest.approx(norm, rel=1e-6)


OPTIMIZERS = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [math.inf, 0.01])
def test_every_optimizer_steps_on_the_clipped_sum_in_the_dtype_of_the_weights(
    name: str, max_norm: float
) -> None:
    batches = rows(8, torch.bfloat16)
    model, twin = model_of(torch.bfloat16), model_of(torch.bfloat16)
    theirs = OPTIMIZERS[name](list(twin.parameters()))
    updater = ms.Updater(
        model,
        OPTIMIZERS[name](list(model.parameters())),
        clip=ms.ByGlobalNorm(max_norm),
        accumulation=Wide(),
    )
    for _ in range(2):
        updater.update(batches, loss_sum, count=ms.rows())
        total = summed_in_float64(twin, batches)
        norm = math.sqrt(sum(float(t.square().sum()) for t in total))
        for p, t in zip(twin.parameters(), total, strict=True):
            p.grad = (t * min(1.0, max_norm / norm)).to(p.dtype)
        theirs.step()
    # float32 and float64 sums round to neighbours once in a while.
    assert distance(model.parameters(), twin.parameters()) < 4e-3
    assert all(p.grad.dtype is torch.bfloat16 for p in model.parameters())
    if max_norm < math.inf:
        found = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
        assert found == pytest.approx(max_norm, rel=4e-3)


def test_a_lazy_update_rounds_once_too() -> None:
    ends = []
    for lazy in (False, True):
        model = model_of(torch.bfloat16)
        updater = ms.Updater(
            model,
            OPTIMIZERS["fused AdamW"](list(model.parameters())),
            clip=ms.ByGlobalNorm(0.01),
            accumulation=Wide(),
            lazy=lazy,
        )
        for _ in range(3):
            updater.update(rows(8, torch.bfloat16), loss_sum, count=ms.rows())
        updater.settle()
        ends.append([p.detach() for p in model.parameters()])
    assert distance(*ends) < 4e-3


def test_parameters_in_float32_beside_them_are_left_alone() -> None:
    model = nn.ModuleList([nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4)])
    updater = ms.Updater(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        clip=ms.ByGlobalNorm(0.1),
        accumulation=Wide(),
    )

    def loss(model: Any, x: Tensor) -> Tensor:
        return model[1](model[0](x).float()).square().sum()

    for _ in range(2):
        record = updater.update([torch.ones(2, 4).bfloat16()] * 3, loss, count=ms.rows())
    assert [p.grad.dtype for p in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    assert record.clipped
    assert norm == pytest.approx(0.1, rel=4e-3)


def test_a_window_that_is_skipped_leaves_the_next_one_wide() -> None:
    model = model_of(torch.bfloat16)
    updater = ms.Updater(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        nonfinite=ms.Skip(),
        accumulation=Wide(),
    )
    bad = [torch.full((2, 6), math.nan).bfloat16()]
    assert not updater.update(bad, loss_sum, count=ms.rows()).applied
    batches = rows(200, torch.bfloat16)
    truth = summed_in_float64(model_of(torch.bfloat16), batches)
    assert updater.update(batches, loss_sum, count=ms.rows()).applied
    assert error_of([p.grad for p in model.parameters()], truth) < 2**-8


def test_a_trial_that_ends_in_a_skipped_window_gives_the_gradients_back() -> None:
    model = model_of(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    updater = ms.Updater(model, optimizer, nonfinite=ms.Skip(), accumulation=Wide())
    updater.update(rows(4, torch.bfloat16), loss_sum, count=ms.rows())
    before = [p.grad.clone() for p in model.parameters()]
    with trial(updater):
        bad = [torch.full((2, 6), math.nan).bfloat16()]
        assert not updater.update(bad, loss_sum, count=ms.rows()).applied
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))


def test_four_bytes_a_parameter_at_the_end_of_a_window_and_two_after_it() -> None:
    model = nn.Linear(64, 64).bfloat16()
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.0), accumulation=Wide())
    num = sum(p.numel() for p in model.parameters())
    for window in updater.windows([torch.ones(1, 64).bfloat16()] * 2, size=2, count=ms.rows()):
        for x in window:
            window.backward(model(x).float().sum())
        assert sum(p.grad.nbytes for p in model.parameters()) == 4 * num
        window.step()
    assert sum(p.grad.nbytes for p in model.parameters()) == 2 * num


def test_a_model_in_float32_is_refused() -> None:
    model = model_of(torch.float32)
    with pytest.raises(ValueError, match="wide already"):
        ms.Updater(model, torch.optim.SGD(model.parameters()), accumulation=Wide())


def test_ways_to_accumulate_say_what_they_are() -> None:
    assert repr(Wide()) == "Wide()"
    assert repr(Fused(5)) == "Fused(num_entries=5)"


@pytest.mark.parametrize("compensated", [False, True])
def test_one_object_in_two_updaters_is_refused(compensated: bool) -> None:
    # The first updater's sums would go on in autograd's own way, without a word.
    accumulation = Wide(compensated=compensated)
    first, second = (model_of(torch.float32 if compensated else torch.bfloat16) for _ in range(2))
    optimizer = torch.optim.SGD(first.parameters(), lr=0.0)
    for _ in range(2):  # the same optimizer may come again
        ms.Updater(first, optimizer, accumulation=accumulation)
    other = torch.optim.SGD(second.parameters(), lr=0.0)
    with pytest.raises(ValueError, match=r"another `Updater` already.*Make one for each"):
        ms.Updater(second, other, accumulation=accumulation)
