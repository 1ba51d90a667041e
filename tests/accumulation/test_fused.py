"""Fused accumulation: the gradients of the plain loop, made without a temporary."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_loop import distance, gradients
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import midstep as ms
from midstep.accumulation import Fused

ALL = 0  # take every weight, however small


class Words(nn.Module):
    """An embedding, two layers, and a head that is tied to the embedding."""

    def __init__(self, padding_idx: int | None = None, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(11, 6, padding_idx=padding_idx)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        out: Tensor = self.head(x + self.down(torch.tanh(self.up(x))))
        return out


def batches(count: int = 4, rows: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(11, (rows, 5), generator=generator) for _ in range(count)]


def loss_sum(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten(), reduction="sum")


def window_gradients(
    model: nn.Module,
    accumulation: Fused | None,
    loss: Callable[[nn.Module, Tensor], Tensor] = loss_sum,
    **stages: Any,
) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    updater = ms.Updater(model, optimizer, accumulation=accumulation, **stages)
    for _ in range(2):  # the second window finds the modules as the first left them
        updater.update(batches(), loss, count=ms.elements())
    return gradients(model)


def both(
    make: Callable[[], nn.Module],
    change: Callable[[nn.Module], object] = nn.Module.train,
    loss: Callable[[nn.Module, Tensor], Tensor] = loss_sum,
    **stages: Any,
) -> float:
    """How far the fused gradients are from the plain ones."""
    found = []
    for accumulation in (None, Fused(ALL)):
        model = make()
        change(model)
        found.append(window_gradients(model, accumulation, loss, **stages))
    return distance(*found)


def double() -> nn.Module:
    return Words().double()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_gradients_are_those_of_autograd(tied: bool, padding_idx: int | None) -> None:
    assert both(lambda: Words(padding_idx, tied=tied).double()) < 1e-14


def test_weights_are_written_to_from_the_second_microbatch_on() -> None:
    """Or every test here would pass for a module that does nothing."""
    calls = []
    model = Words(tied=False)
    updater = ms.Updater(
        model, torch.optim.SGD(model.parameters(), lr=0.0), accumulation=Fused(ALL)
    )
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        updater.update(batches(), loss_sum, count=ms.elements())
    calls = [event.name for event in seen.events()]
    assert calls.count("aten::addmm_") == 3 * 3  # three layers, three microbatches
    assert calls.count("aten::index_add_") == 3


def freeze(model: nn.Module) -> None:
    model.up.weight.requires_grad_(False)  # type: ignore[union-attr]
    model.words.weight.requires_grad_(False)  # type: ignore[union-attr]


def hook(model: nn.Module) -> None:
    model.up.weight.register_hook(lambda grad: grad * 2.0)  # type: ignore[operator,union-attr]


def late_hook(model: nn.Module) -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model.up.weight.register_post_accumulate_grad_hook(halve)  # type: ignore[operator,union-attr]


def module_hooks(model: nn.Module) -> None:
    model.up.register_forward_hook(lambda *given: given[-1] * 2.0)
    model.down.register_full_backward_hook(lambda *given: (given[1][0] * 3.0,))


@pytest.mark.filterwarnings("ignore:.*trainable parameters")
@pytest.mark.parametrize("change", [freeze, hook, late_hook, module_hooks])
def test_frozen_weights_and_hooks_are_as_in_autograd(change: Callable[[nn.Module], None]) -> None:
    assert both(lambda: Words(tied=False).double(), change) < 1e-14


def test_a_weight_unfrozen_later_is_fused_too() -> None:
    found = []
    for accumulation in (None, Fused(ALL)):
        model = double()
        model.up.weight.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        updater = ms.Updater(model, optimizer, accumulation=accumulation)
        updater.update(batches(), loss_sum, count=ms.elements())
        model.up.weight.requires_grad_(True)
        updater.update(batches(), loss_sum, count=ms.elements())
        found.append(gradients(model))
    assert distance(*found) < 1e-14


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_blocks_are_as_in_autograd(reentrant: bool) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        x = model.words(ids)  # type: ignore[operator]
        block = lambda x: model.down(torch.tanh(model.up(x)))  # type: ignore[operator] # noqa: E731
        x = checkpoint(block, x, use_reentrant=reentrant)
        out = model.head(x)  # type: ignore[operator]
        return F.cross_entropy(out.flatten(0, 1), ids.flatten(), reduction="sum")

    assert both(double, loss=loss) < 1e-14


@pytest.mark.parametrize("precision", [ms.BF16(), ms.FP16(init_scale=256.0)], ids=repr)
def test_under_autocast_gradients_are_those_of_autograd_to_the_bit(precision: Any) -> None:
    assert both(Words, precision=precision) == 0.0


def test_what_a_caller_asks_autograd_for_is_handed_out_and_not_added() -> None:
    """A gradient penalty inside the loss, with a graph and without, from the weights themselves."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        inner = loss_sum(model, ids)
        weights = [p for p in model.parameters() if p.requires_grad]
        penalty = sum(
            g.square().sum() for g in torch.autograd.grad(inner, weights, create_graph=True)
        )
        seen = torch.autograd.grad(loss_sum(model, ids), weights)
        return inner + 0.1 * penalty + 0.01 * sum(g.sum() for g in seen)

    assert both(double, loss=loss) < 1e-13


def test_what_is_asked_for_inside_a_backward_is_handed_out_and_not_added() -> None:
    class Asks(torch.autograd.Function):
        """Its backward takes the gradients of another loss, of the same weights."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, model: nn.Module, ids: Tensor) -> Tensor:
            ctx.model, ctx.ids = model, ids
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            with torch.enable_grad():
                inner = loss_sum(ctx.model, ctx.ids)
            found = torch.autograd.grad(inner, list(ctx.model.parameters()))
            return grads[0] * (1.0 + sum(g.abs().sum() for g in found)), None, None

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return Asks.apply(loss_sum(model, ids), model, ids)  # type: ignore[no-untyped-call]

    assert both(double, loss=loss) < 1e-11


def test_a_function_transform_sees_the_plain_module() -> None:
    model = Words(tied=False)
    Fused(ALL).attach(model, torch.optim.SGD(model.parameters(), lr=0.0), None)
    ids = batches(1)[0]
    mapped = torch.func.vmap(lambda row: torch.func.functional_call(model, {}, (row,)))(ids)
    assert torch.allclose(mapped, model(ids), atol=1e-6)


def test_a_module_that_is_compiled_inside_sees_the_plain_one() -> None:
    def compiled(model: nn.Module) -> Callable[[nn.Module, Tensor], Tensor]:
        forward = torch.compile(model, backend="eager", fullgraph=True)
        return lambda _, ids: F.cross_entropy(
            forward(ids).flatten(0, 1), ids.flatten(), reduction="sum"
        )

    found = []
    for accumulation in (None, Fused(ALL)):
        model = double()
        found.append(window_gradients(model, accumulation, compiled(model)))
    assert distance(*found) < 1e-14


def test_no_temporary_of_the_size_of_a_weight_is_made() -> None:
    """Bytes that backward asks the allocator for, in the second microbatch of a window."""
    asked = {}
    for accumulation in (None, Fused()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        updater = ms.Updater(model, optimizer, accumulation=accumulation)
        x = [torch.randn(2, 512) for _ in range(2)]
        (window,) = (updater.windows(x, size=2, count=ms.rows()),)
        for begun in window:
            for index, batch in enumerate(begun):
                loss = model(batch).square().sum()
                gc.collect()
                with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                    begun.backward(loss)
                if index == 1:
                    sizes = [e.self_cpu_memory_usage for e in seen.events()]
                    asked[accumulation is not None] = sum(s for s in sizes if s > 0)
            begun.step()
    weight = 512 * 512 * 4
    assert asked[False] >= 2 * weight
    assert asked[True] < weight / 8


def test_a_copy_of_a_fused_model_writes_to_its_own_gradients() -> None:
    model = Words(tied=False)
    fused = Fused(ALL)
    fused.attach(model, torch.optim.SGD(model.parameters(), lr=0.0), None)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.up.weight.zero_()
    loss_sum(twin, batches(1)[0]).backward()
    assert twin.up.weight.grad is not None
    assert model.up.weight.grad is None
    fused.detach()
    assert "forward" not in vars(model.up)


def test_a_model_without_a_large_weight_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"no `nn.Linear`.*65,536"):
        ms.Updater(model, torch.optim.SGD(model.parameters()), accumulation=Fused())


def test_a_compiled_model_is_refused() -> None:
    model: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    with pytest.raises(ValueError, match="compiled"):
        ms.Updater(model, torch.optim.SGD(model.parameters()), accumulation=Fused(ALL))


@pytest.mark.parametrize("value", [Fused, "fused", True])
def test_what_is_no_way_to_accumulate_is_refused(value: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="no `attach"):
        ms.Updater(model, torch.optim.SGD(model.parameters()), accumulation=value)


@pytest.mark.parametrize("value", [-1, True, float("nan")])
def test_a_threshold_that_is_no_number_of_entries_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="number of entries"):
        Fused(value)
