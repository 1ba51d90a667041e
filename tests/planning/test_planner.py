"""What is predicted is what is held when it is run, for six kinds of models."""

import contextlib
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import midstep as ms
from midstep.arithmetic import Sharded
from midstep.planning import Plan, peak_of, plan
from midstep.planning.trace import held_by, run_microbatch, trace
from midstep.planning.twin import fake_twin, real_twin
from midstep.planning.ways import Way, microbatches_for
from midstep.recipes.gpt import GPT, GPTConfig
from midstep.recomputing import recompute, repeated_blocks


@dataclasses.dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Any]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def mlp() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)]
    return nn.Sequential(nn.Linear(32, 128), nn.Sequential(*blocks), nn.Linear(128, 10))


def cnn() -> nn.Module:
    blocks = [
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        for _ in range(3)
    ]
    first = nn.Conv2d(3, 16, 3, padding=1)
    return nn.Sequential(first, nn.Sequential(*blocks), nn.Flatten(), nn.Linear(4096, 10))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        y: Tensor = self.head(self.encoder(x, src_key_padding_mask=padding).mean(1))
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(x)[0][:, -1])
        return y


def labels() -> Tensor:
    return torch.arange(8) % 10


def classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    given = {name: value for name, value in batch.items() if name != "labels"}
    return F.cross_entropy(model(*given.values()), batch["labels"], reduction="sum")


def next_byte(model: nn.Module, batch: dict[str, Tensor]) -> ms.LossSum:
    logits = model(batch["input_ids"], document_ids=batch["document_ids"])
    return ms.cross_entropy(logits, batch["labels"], shift=True)


def bytes_of(rows: int) -> dict[str, Tensor]:
    ids = torch.arange(rows * 64).reshape(rows, 64) % 256
    return {"input_ids": ids, "document_ids": torch.zeros_like(ids), "labels": ids}


def gpt2() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=3, n_head=4, use_cache=False
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def transformers_loss(model: Any, batch: dict[str, Tensor]) -> ms.LossSum:
    return ms.cross_entropy(model(batch["input_ids"]).logits, batch["labels"], shift=True)


CASES = {
    "mlp": Case(mlp, lambda: {"x": torch.randn(8, 32), "labels": labels()}, classify),
    "cnn": Case(cnn, lambda: {"x": torch.randn(8, 3, 16, 16), "labels": labels()}, classify),
    "gpt": Case(
        lambda: GPT(GPTConfig(width=64, depth=3, num_heads=2, dropout=0.1)),
        lambda: bytes_of(8),
        next_byte,
    ),
    "encoder": Case(
        Encoder,
        lambda: {
            "x": torch.randn(8, 24, 64),
            "padding": torch.arange(24)[None] >= torch.arange(17, 25)[:, None],
            "labels": labels(),
        },
        classify,
    ),
    "lstm": Case(Recurrent, lambda: {"x": torch.randn(8, 20, 32), "labels": labels()}, classify),
    "transformers": Case(gpt2, lambda: bytes_of(8), transformers_loss),
}
PRECISIONS = [ms.FP32(), ms.BF16()]


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(0)
    return CASES[request.param]


def planned(case: Case, model: nn.Module, **settings: Any) -> Plan:
    return plan(model, case.batch(), case.loss, optimizer=adamw, **{"rows": 64, **settings})


# PyTorch tells it once a process when something is released that was there before the measuring.
@pytest.mark.filterwarnings("ignore:The forward of the blocks changes:UserWarning")
def test_the_predicted_peak_is_the_measured_one(case: Case) -> None:
    model = case.make()
    choices = [0, 2] if len(repeated_blocks(model)) > 1 else [0]
    found = planned(case, model, every=choices, pieces=[1, 4], exactly=True)
    errors = {}
    for way in found.ways:
        torch.manual_seed(1)
        checked = found.check(case.make(), case.batch(), case.loss, optimizer=adamw, way=way)
        errors[way.precision, way.every, way.num_microbatches] = checked.error
    assert len(errors) == 2 * 2 * len(choices)
    assert max(abs(error) for error in errors.values()) < 0.05, errors


@pytest.mark.filterwarnings("ignore:The forward of the blocks changes:UserWarning")
def test_the_fake_trace_is_the_real_one_and_that_of_the_allocator(case: Case) -> None:
    model, batch = case.make(), case.batch()
    for precision in PRECISIONS:
        for every in (0, 2) if len(repeated_blocks(model)) > 1 else (0,):
            settings = {"rows": 8, "precision": precision, "every": every, "is_alone": True}
            fake = trace(fake_twin(model, batch), case.loss, **settings).most
            real = trace(real_twin(model, batch), case.loss, **settings).most
            with recompute(model, every=every) if every else contextlib.nullcontext():
                run = functools.partial(run_microbatch, model, batch, case.loss, precision)
                run()  # what is made once
                model.zero_grad()
                measured = peak_of(run).num_bytes
                model.zero_grad()
            assert fake == pytest.approx(real, rel=0.005)
            if precision.autocast_dtype is None:
                assert fake == pytest.approx(measured, rel=0.01)
            else:  # what a CPU's products in 16 bits take inside is much of so small a model
                assert fake == pytest.approx(measured, rel=0.02, abs=50_000)


def test_planning_leaves_the_model_alone_and_takes_no_memory() -> None:
    case = CASES["gpt"]
    torch.manual_seed(0)
    model = case.make()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    draws = torch.get_rng_state()
    planned(case, model, budget=10_000_000, pieces=[4, 8], every=[0, 1])
    assert torch.equal(torch.get_rng_state(), draws)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(p.grad is None for p in model.parameters())
    assert not hasattr(next(model.parameters()), "fake_mode")


def test_a_function_makes_a_model_that_would_fit_nowhere() -> None:
    def huge() -> nn.Module:
        return nn.Sequential(*(nn.Linear(65_536, 65_536, bias=False) for _ in range(4)))

    found = plan(
        huge,
        torch.zeros(1, 1).expand(2, 65_536),
        lambda model, x: model(x).sum(),
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
        rows=2,
        budget=24 * 10**9,
    )
    state = {line.name: line.num_bytes for line in found.state}
    assert state["parameters"] == 4 * 65_536**2 * 4
    # Beside its moments Adam keeps one step counter for each parameter.
    assert state["optimizer state"] == 2 * state["parameters"] + 4 * 4
    assert found.best is None
    assert "too much" in found.ways[0].why


def test_held_state_is_what_the_real_optimizer_keeps() -> None:
    case = CASES["mlp"]
    model = case.make()
    held = held_by(fake_twin(model, case.batch()), adamw)
    optimizer = adamw(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    kept = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    assert held.optimizer == kept
    assert held.parameters == held.gradients == sum(p.nbytes for p in model.parameters())


def test_what_fits_comes_first_then_the_fastest_and_the_fewest_pieces() -> None:
    case = CASES["gpt"]
    model = case.make()
    free = planned(case, model, rows=16)
    assert (free.ways[0].num_microbatches, free.ways[0].every, free.ways[0].precision) == (
        1,
        0,
        "FP32",
    )
    tight = planned(case, model, rows=16, budget=int(0.5 * free.ways[0].peak_bytes))
    fits = [way.fits for way in tight.ways]
    assert fits == sorted(fits, reverse=True)
    assert tight.best is not None
    assert tight.best.every == 0
    assert tight.best.peak_bytes + tight.headroom.num_bytes <= 0.5 * free.ways[0].peak_bytes
    times = [way.relative_time for way in tight.ways if way.fits]
    assert times == sorted(times)
    assert all(way.relative_time > 1.1 for way in tight.ways if way.every)


def test_timed_ways_are_ranked_by_what_they_took_and_leave_no_trace() -> None:
    class Slow(nn.Module):
        """Takes 20 ms a microbatch, whatever it holds, and 10 ms more in 16 bits."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            if not isinstance(x, FakeTensor):
                time.sleep(0.03 if torch.is_autocast_enabled("cpu") else 0.02)
            y: Tensor = self.norm(x)
            return y

    model, x = Slow(), torch.randn(8, 4)
    before = [buffer.clone() for buffer in model.buffers()]
    settings: dict[str, Any] = {"rows": 8, "pieces": [1, 4]}
    found = plan(
        model,
        x,
        lambda model, x: model(x).square().sum(),
        optimizer=adamw,
        timed=True,
        **settings,
    )
    order = [(way.precision, way.num_microbatches) for way in found.ways]
    assert order == [("FP32", 1), ("BF16", 1), ("FP32", 4), ("BF16", 4)]
    assert found.ways[0].relative_time == pytest.approx(1.0)
    assert found.ways[2].relative_time == pytest.approx(4.0, rel=0.5)
    assert "Time was measured" in str(found)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    with pytest.raises(TypeError, match="cannot be run"):
        plan(Slow, x, lambda model, x: model(x).sum(), optimizer=adamw, timed=True, **settings)


def test_what_is_not_exact_is_said() -> None:
    found = planned(CASES["cnn"], cnn())
    said = {(way.precision, way.num_microbatches): way.inexact for way in found.ways}
    assert said["FP32", 1] == ""
    assert said["FP32", 4] == "BatchNorm over 16 rows"
    assert said["BF16", 1] == "forward in bfloat16"


def test_a_target_in_targets_is_counted_in_the_batch() -> None:
    case = CASES["gpt"]
    batch = case.batch()
    batch["labels"][:, 32:] = -100
    found = plan(
        case.make(),
        batch,
        case.loss,
        optimizer=adamw,
        targets=1000,
        count=ms.targets(key="labels"),
        precisions=[ms.FP32()],
        every=[0],
    )
    assert found.rows == 32  # 31.25 rows of 32 targets


def test_ranks_share_what_is_sharded_and_deferring_costs_whole_gradients() -> None:
    case = CASES["gpt"]
    model = case.make()
    one = planned(case, model, every=[0], precisions=[ms.FP32()], pieces=[4, 16])
    four = planned(
        case,
        model,
        every=[0],
        precisions=[ms.FP32()],
        pieces=[2, 4],
        num_ranks=4,
        sharded=Sharded.PARAMETERS,
    )
    alone = {line.name: line.num_bytes for line in one.state}
    here = {line.name: line.num_bytes for line in four.state}
    assert here["parameters"] == pytest.approx(alone["parameters"] / 4, abs=1)
    assert here["gradients"] == alone["gradients"]
    by_pieces: dict[int, dict[bool, Way]] = {}
    for way in four.ways:
        by_pieces.setdefault(way.num_microbatches, {})[way.defers] = way
    pair = by_pieces[4]
    saved = pair[True].peak_bytes - pair[False].peak_bytes
    assert saved == pytest.approx(0.75 * alone["gradients"], rel=1e-3)
    assert (pair[True].num_rounds, pair[False].num_rounds) == (1, 4)


def test_microbatches_are_as_even_as_it_goes() -> None:
    for rows in range(1, 70):
        for size, pieces in microbatches_for(rows):
            assert (pieces - 1) * size < rows <= pieces * size


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one"),
        ({"rows": 1, "targets": 1}, "exactly one"),
        ({"rows": 0}, "at least 1"),
        ({"targets": 5}, "without `count=`"),
        ({"targets": 5, "count": lambda _: 0}, "holds 0 targets"),
        ({"rows": 8, "budget": 0}, "more than 0 bytes"),
        ({"rows": 8, "headroom": 1.5}, "is a share"),
        ({"rows": 8, "num_ranks": 0}, "at least 1"),
        ({"rows": 8, "pieces": [0]}, "at least 1 microbatch"),
        ({"rows": 8, "every": [99]}, "repeats 6 blocks"),
    ],
    ids=[
        *("neither", "both", "no row", "no count", "no target", "no budget", "headroom", "ranks"),
        *("pieces", "every"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(mlp(), CASES["mlp"].batch(), classify, optimizer=adamw, **settings)


@dataclasses.dataclass
class Rows:
    x: Tensor
    labels: Tensor


def of_rows(model: nn.Module, batch: Rows) -> Tensor:
    return F.cross_entropy(model(batch.x), batch.labels, reduction="sum")


def test_a_batch_of_any_kind_is_repeated_and_cut() -> None:
    batch = CASES["mlp"].batch()
    one = plan(mlp(), batch, classify, optimizer=adamw, rows=32, pieces=[1, 8])
    for other, loss in (
        (Rows(**batch), of_rows),
        (tuple(batch.values()), lambda model, b: of_rows(model, Rows(*b))),
    ):
        two = plan(mlp(), other, loss, optimizer=adamw, rows=32, pieces=[1, 8])
        assert [w.peak_bytes for w in one.ways] == [w.peak_bytes for w in two.ways]


class Experts(nn.Module):
    """Sends each row to one of four, so its shapes depend on values; not made for 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(32, 2048) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        out = x.new_zeros(len(x), 2048)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(x[rows]))
        return out


def test_a_model_whose_shapes_depend_on_values_is_run_for_real_and_left_alone() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = model(x)
        return y.square().sum()

    torch.manual_seed(0)
    model, x = Experts(), torch.randn(64, 32)
    before = [p.detach().clone() for p in model.parameters()]
    draws = torch.get_rng_state()
    found = plan(model, x, loss, optimizer=adamw, rows=256, every=[0], exactly=True)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(draws, torch.get_rng_state())
    assert max(way.rows for way in found.ways) == 64
    assert {way.precision for way in found.ways} == {"FP32"}
    assert "run for real" in str(found)
    assert "BF16 is left out" in str(found)
    assert abs(found.check(model, x, loss, optimizer=adamw).error) < 0.05
    with pytest.raises(TypeError, match="depend on values"):
        plan(Experts, x, loss, optimizer=adamw, rows=256)


def test_a_batch_norm_is_never_planned_on_a_single_row() -> None:
    model = nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8))
    found = plan(model, CASES["mlp"].batch(), classify, optimizer=adamw, rows=8)
    assert {way.rows for way in found.ways} == {2, 4, 8}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, b: model(b["x"]), r"gave shape \[\d, 10\]"),
        (lambda *_: 1.0, "gave 1.0"),
        (lambda model, b: model(b["x"]).sum().detach(), "requires a gradient"),
    ],
    ids=["many numbers", "a float", "detached"],
)
def test_a_loss_without_a_backward_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(mlp(), CASES["mlp"].batch(), loss, optimizer=adamw, rows=8)


def test_what_is_no_model_and_a_batch_without_rows_are_refused() -> None:
    for wrong in ("model", lambda: "model"):
        with pytest.raises(TypeError, match="no function that makes one"):
            plan(wrong, CASES["mlp"].batch(), classify, optimizer=adamw, rows=8)  # type: ignore[arg-type]
    empty = {name: tensor[:0] for name, tensor in CASES["mlp"].batch().items()}
    with pytest.raises(ValueError, match="holds no rows"):
        plan(mlp(), empty, classify, optimizer=adamw, rows=8)


def test_a_plan_without_a_way_or_of_many_ranks_is_not_checked() -> None:
    case = CASES["mlp"]
    model = case.make()
    tight = planned(case, model, budget=1000)
    with pytest.raises(ValueError, match="no way fits"):
        tight.check(model, case.batch(), case.loss, optimizer=adamw)
    many = planned(case, model, num_ranks=2)
    with pytest.raises(ValueError, match="2 ranks"):
        many.check(model, case.batch(), case.loss, optimizer=adamw)


def test_recompute_that_is_there_already_is_planned_around() -> None:
    # A handle's hooks would be copied into the twin and know its blocks by the wrong identity.
    model = mlp()
    with recompute(model), pytest.raises(ValueError, match="remove"):
        plan(model, CASES["mlp"].batch(), classify, optimizer=adamw, rows=8)
