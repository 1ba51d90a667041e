"""The held-out loss: the true mean of everything held out, and no trace of having asked."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import midstep as ms
from midstep.errors import RecipeError
from midstep.precision import FP32
from midstep.recipes.held_out import HeldOut, measure


def model_with_memory() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4))


def recipe(model: nn.Module, **given: object) -> ms.Recipe:
    fields: dict[str, object] = {
        "model": model,
        "train": [],
        "loss": lambda model, batch: ms.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr),
        "size": 1,
    }
    return ms.Recipe(**{**fields, **given})  # type: ignore[arg-type]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    x, y = torch.randn(12, 3), torch.randint(0, 4, (12,))
    y[:5] = -100
    return [(x[:5], y[:5]), (x[5:7], y[5:7]), (x[7:], y[7:])]  # the first holds no target


def measured(made: ms.Recipe, **given: object) -> HeldOut:
    found = measure(made, **{"precision": FP32(), "step": 3, "update": 4, **given})  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize("count", [None, ms.targets()], ids=["carried", "counted"])
def test_it_is_the_mean_over_all_targets_not_a_mean_of_means(count: object) -> None:
    model = model_with_memory()
    found = measured(recipe(model, held_out=batches(), count=count))
    double = model_with_memory().double().eval()
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    due = F.cross_entropy(double(x.double()), y).item()
    assert found.loss_mean == pytest.approx(due, rel=1e-6)
    assert (found.step, found.update, found.denominators) == (3, 4, {"loss": 7})


def test_each_term_has_its_own_denominator() -> None:
    model = model_with_memory()
    found = measured(
        recipe(
            model,
            held_out=batches(),
            loss=lambda model, batch: {
                "lm": ms.cross_entropy(model(batch[0]), batch[1]),
                "aux": model(batch[0]).square().sum(),
            },
            count=lambda batch: {"lm": ms.targets()(batch), "aux": len(batch[0])},
        )
    )
    double = model_with_memory().double().eval()
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    lm, aux = F.cross_entropy(double(x.double()), y), double(x.double()).square().sum() / 12
    assert found.loss_means == {
        "lm": pytest.approx(lm.item(), rel=1e-6),
        "aux": pytest.approx(aux.item(), rel=1e-6),
    }
    assert found.loss_mean == pytest.approx((lm + aux).item(), rel=1e-6)


def test_it_leaves_no_trace_in_model_mode_random_streams_or_loader() -> None:
    model = model_with_memory()
    model[1].eval()  # frozen, as in fine-tuning
    order = torch.Generator().manual_seed(5)
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True, generator=order)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    random, drawn = torch.get_rng_state(), order.get_state()
    measured(recipe(model, held_out=loader))
    # A loader without a generator of its own draws from the global stream each time it is begun.
    measured(recipe(model, held_out=DataLoader(TensorDataset(x, y), batch_size=4)))
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(order.get_state(), drawn)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_mode_and_streams_return_after_an_error_too() -> None:
    model = model_with_memory()
    random = torch.get_rng_state()

    def broken() -> Iterator[object]:
        torch.rand(1)
        raise OSError("the disk is gone")
        yield

    with pytest.raises(OSError, match="the disk is gone"):
        measured(recipe(model, held_out=broken()))
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)


class _Merging(nn.Linear):
    """A layer that does more than set a flag when it changes mode, as merged adapters do."""

    merged = False

    def train(self, mode: bool = True) -> "_Merging":
        self.merged = not mode
        return super().train(mode)


def test_a_model_that_acts_on_a_change_of_mode_is_told_of_both() -> None:
    model = _Merging(3, 4)
    measured(recipe(model, held_out=batches()))
    assert not model.merged


def test_it_runs_in_the_precision_of_the_training() -> None:
    model = model_with_memory()
    full = measured(recipe(model, held_out=batches()))
    low = measured(recipe(model, held_out=batches()), precision=ms.BF16())
    assert low.loss_mean != full.loss_mean
    assert low.loss_mean == pytest.approx(full.loss_mean, rel=0.02)


def test_it_can_be_stopped_before_any_batch() -> None:
    answers = iter([False, True])
    made = recipe(model_with_memory(), held_out=batches())
    stopped = measure(made, precision=FP32(), step=1, update=1, should_stop=lambda: next(answers))
    assert stopped is None


@pytest.mark.parametrize("held_out", [None, [], batches()[:1]])
def test_nothing_held_out_is_refused(held_out: object) -> None:
    with pytest.raises(RecipeError, match="nothing to take a mean over"):
        measured(recipe(model_with_memory(), held_out=held_out))


def test_a_bare_loss_without_a_count_is_refused() -> None:
    made = recipe(
        model_with_memory(), held_out=batches(), loss=lambda model, batch: model(batch[0]).sum()
    )
    with pytest.raises(RecipeError, match="what its mean is over"):
        measured(made)


@pytest.mark.parametrize("loss", [2.5, math.inf, math.nan])
def test_a_line_is_strict_json_and_reads_back(loss: float) -> None:
    held_out = HeldOut(
        step=1, update=2, loss_mean=loss, loss_means={"loss": loss}, denominators={"loss": 3},
        seconds=0.5,
    )  # fmt: skip
    line = held_out.to_json()
    assert "NaN" not in line
    assert "Infinity" not in line
    assert repr(HeldOut.from_json(line)) == repr(held_out)
