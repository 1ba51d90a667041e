"""What observers say is what plain torch says, of the true gradient and the real update."""

import math
import time
from typing import Any

import pytest
import torch
from plain_loop import classifier, full_batch_gradient, loss_sum, norm_of, pairs, weights
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import midstep as ms
from midstep.observers import Entries, GradNorms, Memory, Moments, Stages, Updates

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
GROUPED = NAMES[::2] + NAMES[1::2]  # the order of the optimizer


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "lr": 1}]


CLIPS = [None, ms.ByGlobalNorm(0.01), ms.ByValue(0.01), ms.ByGlobalNorm(0.1, p=math.inf)]
WAYS = ["counted", "streamed"]


def updated(updater: ms.Updater, way: str, batches: Any) -> ms.UpdateRecord:
    if way == "counted":
        return updater.update(batches, loss_sum, count=ms.targets())
    return updater.update(batches, lambda m, b: ms.cross_entropy(m(b[0]), b[1]))


@pytest.mark.parametrize("clip", CLIPS, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", [ms.FP32(), ms.FP16(init_scale=2.0**12)], ids=str)
def test_norms_by_tensor_and_group_are_those_of_the_true_gradient_before_clipping(
    clip: Any, way: str, precision: Any
) -> None:
    # FP16 in float64 would not train, so the oracle is as exact as float32 is.
    dtype = torch.float64 if isinstance(precision, ms.FP32) else torch.float32
    model, batches = classifier(dtype), pairs(3, 5, 2, dtype=dtype)
    true = full_batch_gradient(model, batches)
    optimizer = torch.optim.SGD(groups_of(model), lr=0.1)
    updater = ms.Updater(model, optimizer, clip=clip, precision=precision, observers=[GradNorms()])
    extra = updated(updater, way, batches).extra
    rel = 1e-12 if dtype == torch.float64 else 1e-2
    assert list(extra["grad_norms"]) == GROUPED
    wanted = {name: norm_of([grad]) for name, grad in zip(NAMES, true, strict=True)}
    assert extra["grad_norms"] == pytest.approx(wanted, rel=rel)
    by_group = [norm_of(true[::2]), norm_of(true[1::2])]
    assert extra["grad_norms_by_group"] == pytest.approx(by_group, rel=rel)


class EntriesRead(TorchDispatchMode):
    """Counts the entries of all tensors that go into a computation."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            leaves = tree_leaves((args, kwargs or {}))
            self.num += sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
        return func(*args, **(kwargs or {}))


def test_norms_cost_no_further_read_of_the_gradients() -> None:
    def entries_read(observers: list[Any]) -> int:
        model = nn.Linear(256, 256, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        updater = ms.Updater(model, optimizer, clip=ms.ByGlobalNorm(1.0), observers=observers)
        with EntriesRead() as entries:
            updater.update([torch.ones(2, 256)], lambda m, x: m(x).sum(), count=ms.rows())
        return entries.num

    further = entries_read([GradNorms()]) - entries_read([])
    assert 0 < further < 0.01 * 256 * 256  # what the one read left: a number for each 512


def test_the_largest_entry_and_the_zeros_are_found() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        model[0].bias[:2] = -100.0  # two units that are dead
    batches = pairs(3, 5)
    true = full_batch_gradient(model, batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = ms.Updater(model, optimizer, clip=ms.ByGlobalNorm(0.01), observers=[Entries()])
    extra = updated(updater, "streamed", batches).extra
    largest = [grad.abs().max().item() for grad in true]
    assert extra["grad_largest"] == pytest.approx(max(largest), rel=1e-12)
    assert extra["grad_largest_in"] == NAMES[largest.index(max(largest))]
    zeros = [(grad == 0).double().mean().item() for grad in true]
    assert zeros[0] >= 2 / 6
    assert extra["grad_zeros_by_tensor"] == pytest.approx(dict(zip(NAMES, zeros, strict=True)))
    every = torch.cat([grad.flatten() for grad in true])
    assert extra["grad_zeros"] == pytest.approx((every == 0).double().mean().item())


def test_a_row_that_a_sparse_gradient_leaves_out_is_zero() -> None:
    model = nn.Embedding(5, 2, sparse=True).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = ms.Updater(model, optimizer, observers=[Entries(), GradNorms(), Updates()])
    batches = [torch.tensor([1, 1]), torch.tensor([1, 4])]
    extra = updater.update(batches, lambda m, x: m(x).sum(), count=ms.elements()).extra
    assert extra["grad_largest"] == 0.75  # used three times, over four
    assert extra["grad_zeros"] == pytest.approx(0.6)
    assert extra["grad_norms"]["weight"] == pytest.approx(math.sqrt(2 * 0.75**2 + 2 * 0.25**2))
    assert extra["update_norm"] == pytest.approx(0.1 * extra["grad_norms"]["weight"])


def test_an_entry_that_is_not_finite_is_the_largest() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = ms.Updater(
        model, optimizer, nonfinite=ms.Skip(max_consecutive=2), observers=[Entries()]
    )
    with torch.no_grad():
        model[2].weight[0, 0] = float("inf")
    record = updated(updater, "streamed", pairs(3))
    assert record.verdict is ms.Verdict.SKIPPED_NONFINITE
    assert not math.isfinite(record.extra["grad_largest"])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_the_update_is_what_the_weights_really_moved(clip: Any, fused: bool) -> None:
    model = classifier(torch.float32)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01, fused=fused)
    updater = ms.Updater(model, optimizer, clip=clip, observers=[Updates()])
    for seed in range(3):
        before = weights(model)
        extra = updated(updater, "counted", pairs(3, 5, dtype=torch.float32, seed=seed)).extra
        moved = [a.double() - b.double() for a, b in zip(before, weights(model), strict=True)]
        norms = {name: norm_of([m]) for name, m in zip(NAMES, moved, strict=True)}
        assert extra["update_norms"] == pytest.approx(norms, rel=1e-5)
        assert extra["update_norm"] == pytest.approx(norm_of(moved), rel=1e-5)
        norms = {name: norm_of([w]) for name, w in zip(NAMES, before, strict=True)}
        assert extra["weight_norms"] == pytest.approx(norms, rel=1e-6)
        for name, ratio in extra["update_to_weight"].items():
            assert ratio == pytest.approx(extra["update_norms"][name] / extra["weight_norms"][name])
        grads = [p.grad for p in model.parameters()]  # clipped by now
        naive = math.hypot(0.01 * norm_of(grads[::2]), 1.0 * norm_of(grads[1::2]))
        assert extra["naive_update_norm"] == pytest.approx(naive, rel=1e-5)


def test_plain_sgd_moves_by_the_naive_length() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    updater = ms.Updater(model, optimizer, clip=ms.ByGlobalNorm(0.1), observers=[Updates()])
    extra = updated(updater, "counted", pairs(3, 5)).extra
    assert extra["update_norm"] == pytest.approx(0.03, rel=1e-12)
    assert extra["naive_update_norm"] == pytest.approx(0.03, rel=1e-12)


def test_a_tensor_of_zeros_has_no_ratio() -> None:
    model = classifier()
    nn.init.zeros_(model[0].bias)
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.3), observers=[Updates()])
    extra = updated(updater, "counted", pairs(3, 5)).extra
    assert extra["update_norms"]["0.bias"] > 0
    assert "0.bias" not in extra["update_to_weight"]


def test_an_update_lost_to_the_rounding_of_bfloat16_shows_as_no_update() -> None:
    model = nn.Linear(64, 1, bias=False)
    nn.init.ones_(model.weight)
    model.to(torch.bfloat16)
    updater = ms.Updater(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-4),
        precision=ms.BF16(),
        observers=[Updates()],
    )
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    extra = updater.update([x], lambda m, b: m(b).float().sum(), count=ms.rows()).extra
    assert extra["update_norm"] == 0.0
    assert extra["naive_update_norm"] == pytest.approx(8e-4, rel=1e-2)


def test_a_skipped_update_moved_nothing_and_says_nothing() -> None:
    model = classifier()
    updater = ms.Updater(
        model,
        torch.optim.Adam(model.parameters()),
        nonfinite=ms.Skip(max_consecutive=2),
        observers=[Updates(), Moments()],
    )
    batches = pairs(3)
    batches[0][0][0] = float("nan")
    assert updated(updater, "counted", batches).extra == {}


OPTIMIZERS: dict[str, tuple[Any, str | None, str | None]] = {
    "AdamW": (torch.optim.AdamW, "exp_avg", "exp_avg_sq"),
    "RMSprop": (torch.optim.RMSprop, None, "square_avg"),
    "Adagrad": (torch.optim.Adagrad, None, "sum"),
    "Adadelta": (torch.optim.Adadelta, None, "square_avg"),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "momentum_buffer", None),
    "SGD without momentum": (lambda p: torch.optim.SGD(p, lr=0.1), None, None),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_moments_are_those_the_optimizer_keeps(kind: str) -> None:
    make, first, second = OPTIMIZERS[kind]
    model = classifier()
    optimizer = make(model.parameters())
    updater = ms.Updater(model, optimizer, observers=[Moments()])
    for seed in range(2):
        extra = updated(updater, "counted", pairs(3, 5, seed=seed)).extra
    if first is None and second is None:
        assert "moments" not in extra
        return
    for name, parameter in model.named_parameters():
        found, state = dict(extra["moments"][name]), optimizer.state[parameter]
        if first is not None:
            assert found.pop("first") == pytest.approx(norm_of([state[first]]), rel=1e-12)
        if second is not None:
            assert found.pop("second") == pytest.approx(state[second].mean().item(), rel=1e-12)
        assert not found


def test_memory_rises_with_what_is_held_and_never_falls() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = ms.Updater(model, optimizer, observers=[Memory()])
    before = updated(updater, "counted", pairs(3)).extra["memory_bytes"]
    held: list[Tensor] = []

    def loss(m: nn.Module, batch: Any) -> Tensor:
        held.append(torch.ones(before + 50_000_000, dtype=torch.uint8))
        return loss_sum(m, batch)

    during = updater.update(pairs(3), loss, count=ms.targets()).extra["memory_bytes"]
    held.clear()
    after = updated(updater, "counted", pairs(3)).extra["memory_bytes"]
    assert during > before + 50_000_000
    assert after >= during


@pytest.mark.parametrize("way", WAYS)
def test_time_goes_to_the_stage_that_took_it(way: str) -> None:
    class SlowBackward(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, grad: Tensor) -> Tensor:
            time.sleep(0.06)
            return grad

    class SlowSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            time.sleep(0.05)
            return super().step(closure)

    def slow(batches: Any) -> Any:
        for batch in batches:
            time.sleep(0.02)
            yield batch

    def loss(m: nn.Module, batch: Any) -> Any:
        time.sleep(0.04)
        found = ms.cross_entropy(m(batch[0]), batch[1])
        return ms.LossSum(SlowBackward.apply(found.sum), found.count)

    model = classifier()
    optimizer = SlowSGD(model.parameters(), lr=0.1)
    updater = ms.Updater(model, optimizer, observers=[Stages()])
    count = ms.targets() if way == "counted" else None
    for window in updater.windows(slow(pairs(3, 3)), size=2, count=count):
        record = updater.update(window, loss)
    stages = record.extra["stage_seconds"]
    assert list(stages) == ["data", "forward", "backward", "measure", "step"]
    wanted = {"data": 0.04, "forward": 0.08, "backward": 0.12, "step": 0.05}
    for stage, least in wanted.items():
        assert least <= stages[stage] < least + 0.03, stage
    assert stages["measure"] < 0.03
    assert sum(stages.values()) == pytest.approx(record.seconds, abs=0.01)
