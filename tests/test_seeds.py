"""A seeded backward is torch's own backward of the scaled and divided loss."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_loop import classifier, distance, gradients, loss_sum, pairs
from torch import Tensor, nn

import midstep as ms
from midstep import seeds

BATCHES = pairs(3, 4)


class Scored(Tensor):
    """A loss of a class of its own."""


@pytest.mark.parametrize("engine", ["torch's engine", "the public function"])
@pytest.mark.parametrize("loss_class", [Tensor, Scored])
@pytest.mark.parametrize("terms", [1, 2])
def test_a_seeded_backward_is_the_backward_of_the_divided_loss(
    engine: str, loss_class: Any, terms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "the public function":  # where torch has no other
        monkeypatch.setattr(seeds, "_engine_run_backward", None)
    model, full = classifier(), classifier()
    names = [f"term{index}" for index in range(terms)]

    def loss(m: nn.Module, b: Any) -> Any:
        value = loss_sum(m, b).as_subclass(loss_class)
        return dict.fromkeys(names, value)

    ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.0)).update(
        BATCHES, loss, count=lambda _: {name: 5.0 + index for index, name in enumerate(names)}
    )
    for batch in BATCHES:
        total = sum(loss_sum(full, batch) / (2 * (5.0 + index)) for index in range(terms))
        assert isinstance(total, Tensor)
        total.backward()
    assert distance(gradients(model), gradients(full)) < 1e-15


def test_hooks_see_the_seeded_gradient_and_the_graph_is_freed() -> None:
    model = nn.Linear(2, 1, bias=False)
    seen: list[float] = []
    model.weight.register_hook(lambda grad: seen.append(grad.sum().item()))
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
    values: list[Tensor] = []

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        values.append(m(x).square().sum())
        return m(x).sum() + values[-1] * 0.0

    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.0))
    updater.update([torch.ones(1, 2), torch.ones(3, 2)], loss, count=ms.rows())
    assert seen == pytest.approx([0.5, 0.5, 1.5, 2.0])
    with pytest.raises(RuntimeError, match="second time"):
        values[0].backward()


@given(value=st.floats(1e-300, 1e300))
def test_the_power_of_two_is_the_nearest(value: float) -> None:
    found = seeds.power_of_two(value)
    assert math.frexp(found)[0] == 0.5  # a power of two has one bit
    assert found / math.sqrt(2) <= value * (1 + 1e-12)
    assert value <= found * math.sqrt(2) * (1 + 1e-12)


@given(
    count=st.integers(1, 10**9),
    scale=st.sampled_from([1.0, 2.0**16, 3.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_seed_times_unit_is_one_over_the_denominator(
    count: int, scale: float, dtype: torch.dtype
) -> None:
    """Streamed: the provisional divisor cancels, whatever the first microbatch counted."""
    denominators: dict[str, float] = {}
    made = seeds.Seeds(
        scale,
        rank_factor=1.0,
        denominators=denominators,
        num_expected=4,
        divisor=None,
        is_alone=True,
    )
    seed = made.of("loss", torch.zeros((), dtype=dtype), count)
    denominators["loss"] = count * 3
    assert seed.item() * made.unit == pytest.approx(1.0 / (3 * count), rel=1e-6)
    assert made.of("loss", torch.zeros((), dtype=dtype), 1.0) is seed  # once a window
