"""The arithmetic of a training state, held against what torch's own optimizers keep."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from midstep.arithmetic import (
    Dtype,
    OptimizerKind,
    Sharded,
    State,
    lora_parameters,
    memory_of,
    parse_bytes,
    parse_count,
    show_bytes,
)

KIND = OptimizerKind
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def lines(state: State, **settings: Any) -> dict[str, int]:
    return {line.name: line.num_bytes for line in memory_of(state, **settings).rows()}


def test_400_million_parameters_with_adam_take_6_4_gb() -> None:
    memory = memory_of(State(trainable=400_000_000, optimizer=KIND.ADAM))
    assert memory.state_bytes == 6_400_000_000
    assert "6.40 GB (5.96 GiB)" in str(memory)


TORCH: list[tuple[OptimizerKind, Make]] = [
    (KIND.SGD, lambda p: torch.optim.SGD(p, lr=0.1)),
    (KIND.MOMENTUM, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    (KIND.ADAM, torch.optim.Adam),
    (KIND.ADAMW, torch.optim.AdamW),
    (KIND.AMSGRAD, lambda p: torch.optim.AdamW(p, amsgrad=True)),
    (KIND.ADAFACTOR, torch.optim.Adafactor),
    (KIND.RMSPROP, torch.optim.RMSprop),
    (KIND.ADAGRAD, torch.optim.Adagrad),
]


@pytest.mark.parametrize(("kind", "make"), TORCH, ids=[kind.value for kind, _ in TORCH])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_is_what_torch_keeps(kind: OptimizerKind, make: Make, dtype: torch.dtype) -> None:
    shapes = [(6, 10), (3, 4, 5), (7,)]
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    optimizer = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name != "step"
    )
    width = Dtype.FP32 if dtype is torch.float32 else Dtype.BF16
    counted = State(shapes=shapes, optimizer=kind, dtype=width)
    assert lines(counted)["optimizer state"] == kept


def test_muon_keeps_one_moment_of_matrices_and_two_of_the_rest() -> None:
    weight = nn.Parameter(torch.ones(6, 10))
    optimizer = torch.optim.Muon([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    (kept,) = (state["momentum_buffer"] for state in optimizer.state.values())
    assert (
        lines(State(shapes=[(6, 10)], optimizer=KIND.MUON))["optimizer state"] == 4 * kept.numel()
    )
    assert lines(State(shapes=[(7,)], optimizer=KIND.MUON))["optimizer state"] == 2 * 4 * 7


def test_8_bits_need_a_scale_for_each_block_and_spare_small_tensors() -> None:
    large = lines(State(shapes=[(1024, 1024)], optimizer=KIND.ADAM8BIT))["optimizer state"]
    assert large == 2 * (1024 * 1024 + 4 * 4096)
    small = lines(State(shapes=[(1024,)], optimizer=KIND.ADAM8BIT))["optimizer state"]
    assert small == 2 * 4 * 1024


def test_a_master_copy_and_wide_accumulators_are_lines_of_their_own() -> None:
    state = State(trainable=1000, dtype=Dtype.BF16, grad_dtype=Dtype.FP32, master=True)
    found = lines(state, headroom=0.0)
    assert found == {
        "parameters": 2000,
        "wide accumulators": 4000,
        "master weights": 4000,
        "optimizer state": 8000,
        "before activations": 18000,
        "headroom": 0,
    }
    narrow = lines(State(trainable=1000, dtype=Dtype.BF16, grad_dtype=Dtype.FP32), headroom=0.0)
    assert narrow["gradients"] == 2000  # cast once, for the step
    assert narrow["optimizer state"] == 4000


@pytest.mark.parametrize(
    ("sharded", "parameters", "gradients", "moments"),
    [
        (Sharded.NOTHING, 400, 400, 800),
        (Sharded.OPTIMIZER, 400, 400, 200),
        (Sharded.GRADIENTS, 400, 100, 200),
        (Sharded.PARAMETERS, 100, 100, 200),
    ],
)
def test_each_stage_cuts_one_thing_more(
    sharded: Sharded, parameters: int, gradients: int, moments: int
) -> None:
    found = lines(State(trainable=100, num_ranks=4, sharded=sharded))
    assert found["parameters"] == parameters
    assert found["gradients"] == gradients
    assert found["optimizer state"] == moments


def test_deferred_gradients_are_whole_and_gathered_blocks_are_counted() -> None:
    state = State(
        trainable=100,
        num_ranks=4,
        sharded=Sharded.PARAMETERS,
        defers_sync=True,
        largest_block=10,
    )
    assert lines(state)["gradients"] == 400
    assert lines(state)["gathered blocks"] == 80


def test_what_is_frozen_has_neither_gradient_nor_state() -> None:
    adapters = lora_parameters(16, [(128, 4096, 4096)])
    assert adapters == 128 * 16 * 8192
    state = State(
        trainable=adapters, frozen=7_000_000_000, frozen_dtype=Dtype.NF4, dtype=Dtype.BF16
    )
    found = lines(state)
    assert found["frozen parameters"] == pytest.approx(7e9 * 4.127 / 8)
    assert found["gradients"] == 2 * adapters
    assert found["optimizer state"] == 4 * adapters


def test_headroom_is_never_hidden_and_the_budget_is_what_is_left() -> None:
    state = State(trainable=1_000_000_000)
    memory = memory_of(state, budget=parse_bytes("24GB"), headroom=0.1)
    assert memory.headroom.num_bytes == 2_400_000_000
    assert memory.left_bytes == 24_000_000_000 - 16_000_000_000 - 2_400_000_000
    small = memory_of(state, budget=parse_bytes("8GiB"))
    assert small.left_bytes is not None
    assert small.left_bytes < 0


def test_what_is_assumed_without_shapes_is_said() -> None:
    assert "Assumed" in str(memory_of(State(trainable=10**9, optimizer=KIND.ADAFACTOR)))
    assert "Assumed" not in str(memory_of(State(trainable=10**9)))


def test_decimal_and_binary_units_are_different_numbers() -> None:
    assert parse_bytes("24GB") == 24 * 10**9
    assert parse_bytes("24gib") == 24 * 2**30
    assert show_bytes(2**30) == "1.07 GB (1.00 GiB)"
    assert parse_count("1.3B") == 1_300_000_000


@pytest.mark.parametrize("text", ["", "GB", "-3", "3 apples", "0", "1e9"])
def test_a_number_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is "):
        parse_count(text)


@pytest.mark.parametrize(
    "settings", [{}, {"trainable": -1}, {"trainable": 1, "num_ranks": 0}], ids=str
)
def test_a_state_that_cannot_be_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="State"):
        State(**settings)  # type: ignore[arg-type]


def test_a_headroom_that_is_no_share_is_refused() -> None:
    with pytest.raises(ValueError, match="headroom"):
        memory_of(State(trainable=1), headroom=1.0)
