"""A microbatch's own gradient is measured before it is added, whatever it goes through."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_loop import classifier, loss_sum, masked, norm_of, num_targets, pairs, true_gradient
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import midstep as ms
from midstep.observers import Microbatches, NoiseScale, tap
from midstep.observers.measures import norms_of
from midstep.observers.microbatches import outlier_of


def own_norms(model: nn.Module, batches: Any, loss: Any = None) -> list[float]:
    """The norm of the gradient of each microbatch's own mean loss, by plain torch."""
    loss = loss or loss_sum
    return [
        norm_of(true_gradient(model, lambda twin, b=batch: loss(twin, b) / num_targets(b)))
        for batch in batches
    ]


def observed(model: nn.Module, batches: Any, loss: Any = loss_sum, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options.setdefault("observers", [Microbatches()])
    updater = ms.Updater(model, optimizer, clip=ms.ByGlobalNorm(0.01), **options)
    return updater.update(batches, loss, count=ms.targets()).extra


def test_the_norm_of_each_microbatch_is_that_of_its_own_mean_loss() -> None:
    model, batches = classifier(), pairs(3, 9, 1, 4)
    wanted = own_norms(model, batches)
    assert observed(model, batches)["microbatch_grad_norms"] == pytest.approx(wanted, rel=1e-12)


def test_streamed_windows_give_the_same_norms() -> None:
    model, batches = classifier(), pairs(3, 9, 1, 4)
    wanted = own_norms(model, batches)
    updater = ms.Updater(
        model, torch.optim.SGD(model.parameters(), lr=0.1), observers=[Microbatches()]
    )
    for window in updater.windows(batches, size=4):
        for x, y in window:
            window.backward(ms.cross_entropy(model(x), y))
        window.gradients_()  # the division is done by then
        record = window.step()
    assert record.extra["microbatch_grad_norms"] == pytest.approx(wanted, rel=1e-12)


def test_a_scaled_loss_gives_norms_of_the_true_gradient() -> None:
    model, batches = classifier(torch.float32), pairs(3, 9, 4, dtype=torch.float32)
    wanted = own_norms(model, batches)
    found = observed(model, batches, precision=ms.FP16(init_scale=2.0**12))
    assert found["microbatch_grad_norms"] == pytest.approx(wanted, rel=2e-2)


def test_a_microbatch_without_a_target_has_no_norm() -> None:
    model, batches = classifier(), pairs(3, 9, 4)
    batches.insert(1, masked(batches[0]))
    wanted = own_norms(model, [batches[0], *batches[2:]])
    found = observed(model, batches)["microbatch_grad_norms"]
    assert found[1] is None
    assert [found[0], *found[2:]] == pytest.approx(wanted, rel=1e-12)


class Tied(nn.Module):
    """One matrix used as embedding and as head, and one layer used twice."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4).double()
        self.shared = nn.Linear(4, 4).double()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            block = lambda h: torch.tanh(self.shared(h))  # noqa: E731
            if self.way == "plain":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.way == "reentrant")
        return F.linear(x, self.first.weight)[:, :3]


@pytest.mark.parametrize("most_bytes", [2**26, 300, 0])  # of gradients measured together
@pytest.mark.parametrize("way", ["plain", "checkpointed", "reentrant"])
def test_weights_that_are_tied_or_used_several_times_count_once(
    way: str, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap, "_MOST_BYTES", most_bytes)
    batches = pairs(3, 9, 4)
    wanted = own_norms(Tied("plain"), batches)
    model = Tied(way)
    updater = ms.Updater(
        model, torch.optim.SGD(model.parameters(), lr=0.0), observers=[Microbatches()]
    )
    for _ in range(2):  # what was found out in the first window is known in the second
        found = updater.update(batches, loss_sum, count=ms.targets()).extra
        assert found["microbatch_grad_norms"] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(("most_bytes", "num_at_once"), [(2**26, 4), (0, 1)])
def test_gradients_are_measured_together_as_far_as_they_may_wait(
    most_bytes: int, num_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def watched(tensors: list[Tensor]) -> Any:
        seen.append(len(tensors))
        return norms_of(tensors)

    monkeypatch.setattr(tap, "_MOST_BYTES", most_bytes)
    monkeypatch.setattr(tap, "norms_of", watched)
    observed(classifier(), pairs(3, 9))
    assert max(seen) == num_at_once
    assert sum(seen) == 8


def test_a_compiled_model_is_measured_and_not_compiled_again() -> None:
    model, batches = classifier(), pairs(4, 4)
    wanted = own_norms(model, batches)
    compiled = torch.compile(model, backend="aot_eager")
    updater = ms.Updater(
        compiled, torch.optim.SGD(model.parameters(), lr=0.0), observers=[Microbatches(every=2)]
    )
    updater.update(batches, loss_sum, count=ms.targets())
    with torch.compiler.set_stance("fail_on_recompile"):
        extra = updater.update(batches, loss_sum, count=ms.targets()).extra
    assert extra["microbatch_grad_norms"] == pytest.approx(wanted, rel=1e-12)


def test_several_terms_are_measured_together() -> None:
    model, batches = classifier(), pairs(3, 9)

    def loss(m: nn.Module, batch: Any) -> dict[str, Tensor]:
        out = m(batch[0])
        return {
            "lm": F.cross_entropy(out, batch[1], reduction="sum"),
            "aux": out.square().sum() * 0.1,
        }

    def count(batch: Any) -> dict[str, float]:
        return {"lm": num_targets(batch), "aux": len(batch[0])}

    totals = {"lm": sum(map(num_targets, batches)), "aux": 12}

    def part(twin: nn.Module, batch: Any) -> Tensor:
        """Its part in the window, over its share of the first term."""
        terms = loss(twin, batch)
        inside = terms["lm"] / totals["lm"] + terms["aux"] / totals["aux"]
        return inside * totals["lm"] / num_targets(batch)

    wanted = [norm_of(true_gradient(model, lambda t, b=b: part(t, b))) for b in batches]
    updater = ms.Updater(
        model, torch.optim.SGD(model.parameters(), lr=0.1), observers=[Microbatches()]
    )
    found = updater.update(batches, loss, count=count).extra["microbatch_grad_norms"]
    assert found == pytest.approx(wanted, rel=1e-12)


def test_a_frozen_parameter_is_left_out() -> None:
    model, batches = classifier(), pairs(3, 9)
    model[0].weight.requires_grad_(False)
    wanted = own_norms(model, batches)
    updater = ms.Updater(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        observers=[Microbatches(), NoiseScale()],
    )
    found = updater.update(batches, loss_sum, count=ms.targets()).extra["microbatch_grad_norms"]
    assert found == pytest.approx(wanted, rel=1e-12)


def test_the_bad_microbatch_of_a_window_is_named() -> None:
    model, batches = nn.Linear(4, 3).double(), pairs(8, 8, 8, 8)
    assert "outlier_microbatch" not in observed(model, batches)
    batches[2] = (batches[2][0] * 10.0, batches[2][1])
    assert observed(model, batches)["outlier_microbatch"] == 3


@pytest.mark.parametrize(
    ("norms", "counts", "found"),
    [
        ([1.0, 1.0, 5.1], [5, 5, 5], 2),
        ([1.0, 1.0, 4.9], [5, 5, 5], None),
        ([1.0, 9.0], [5, 5], None),  # two do not say which of them is odd
        ([9.0, 1.0, 1.0, 8.0], [5] * 4, 0),
        # A 16th of the targets may be 4 times as long by noise alone.
        ([1.0, 1.0, 19.9], [80, 80, 5], None),
        ([1.0, 1.0, 20.1], [80, 80, 5], 2),
        # A long one among small ones is not excused.
        ([1.0, 1.0, 5.1], [5, 5, 80], 2),
        ([1.0, None, 1.0, 5.1], [5, 0, 5, 5], 3),
        ([1.0, math.inf, 1.0], [5, 5, 5], 1),
        ([math.nan, 1.0], [5, 5], 0),
        ([], [], None),
        ([0.0, 0.0, 0.0], [5, 5, 5], None),
    ],
)
def test_one_stands_out_beyond_five_times_the_median_of_the_others(
    norms: list[float | None], counts: list[float], found: int | None
) -> None:
    assert outlier_of(norms, counts) == found
