"""Compensated sums of every kind of model, among other hooks, and what is refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from summing import Held, Part, cancelling, error_of, errors, held_loss, one, updater_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import midstep as ms
from midstep.accumulation import Wide

Change = Callable[[Any], object]


class Words(nn.Module):
    """An embedding, two layers, and a head that is tied to the embedding."""

    def __init__(self, *, tied: bool = True, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(11, 6, sparse=sparse)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def block(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.tanh(self.up(x)))
        return found

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        found: Tensor = self.head(x + self.block(x))
        return found


def parts(count: int = 6) -> list[Part]:
    generator = torch.Generator().manual_seed(1)
    return cancelling([torch.randint(11, (3, 5), generator=generator) for _ in range(count)])


def entropy(logits: Tensor, part: Part) -> Tensor:
    return part.by * F.cross_entropy(logits.flatten(0, 1), part.x.flatten(), reduction="sum")


def loss_sum(model: Any, part: Part) -> Tensor:
    return entropy(model(part.x), part)


def assert_gains(make: Callable[[], nn.Module], loss: Any = loss_sum) -> None:
    plain, own = errors(make, parts(), loss)
    assert own < 2e-6
    assert plain > 1e-3


def changed(change: Change, *, tied: bool = True) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Words(tied=tied)
        change(model)
        return model

    return make


def freeze(model: Any) -> None:
    model.up.weight.requires_grad_(False)


def hook(model: Any) -> None:
    model.up.weight.register_hook(lambda grad: grad * 2.0)


def module_hooks(model: Any) -> None:
    model.up.register_forward_hook(lambda *given: given[-1] * 2.0)
    model.down.register_full_backward_hook(lambda *given: (given[1][0] * 3.0,))


@pytest.mark.filterwarnings("ignore:.*trainable parameters")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("change", [nn.Module.train, freeze, hook, module_hooks])
def test_tied_and_frozen_weights_and_hooks(change: Change, tied: bool) -> None:
    assert_gains(changed(change, tied=tied))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_blocks(reentrant: bool) -> None:
    def loss(model: Any, part: Part) -> Tensor:
        x = model.words(part.x)
        return entropy(model.head(x + checkpoint(model.block, x, use_reentrant=reentrant)), part)

    assert_gains(Words, loss)


def test_a_weight_that_one_backward_reaches_several_times() -> None:
    """Reentrant recompute brings a part of a gradient after another; both are added to `.grad`."""
    calls = []

    def loss(model: Any, part: Part) -> Tensor:
        x = model.block(model.words(part.x))
        x = x + checkpoint(model.block, x, use_reentrant=True)
        model.up.weight.register_hook(calls.append).remove()
        return entropy(model.head(x), part)

    assert_gains(Words, loss)


def test_losses_of_several_terms_and_two_graphs() -> None:
    def terms(model: Any, part: Part) -> dict[str, Tensor]:
        x = model.words(part.x)
        return {"main": entropy(model.head(x), part), "aux": part.by * model.block(x).sum()}

    def both(model: Any, part: Part) -> Tensor:
        found: Tensor = sum(terms(model, part).values())  # type: ignore[assignment]
        return found

    model = Words()
    plain, _ = errors(Words, parts(), both)
    updater = updater_of(model, Wide(compensated=True))
    updater.update(parts(), terms, count=lambda _: {"main": 1, "aux": 1})
    found = [p.grad for p in model.parameters()]
    twin, total = Words(), [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for part in parts():
        twin.zero_grad()
        both(twin, part).backward(torch.tensor(1 / len(parts())))
        torch._foreach_add_(total, [p.grad.double() for p in twin.parameters()])
    assert error_of(found, total) < 2e-6
    assert plain > 1e-3


def test_a_parameter_that_some_microbatches_leave_out() -> None:
    def loss(model: Any, part: Part) -> Tensor:
        x = model.words(part.x)
        used = part.by != 1.0 or bool(part.x.sum() % 2)
        return entropy(model.head(x + model.block(x) if used else x), part)

    assert len({bool(p.x.sum() % 2) for p in parts() if p.by == 1.0}) == 2
    assert_gains(Words, loss)


def test_a_weight_unfrozen_and_a_group_added_later() -> None:
    model = Words()
    model.up.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(list(model.words.parameters()), lr=0.0)
    optimizer.add_param_group({"params": list(model.up.parameters())})
    with pytest.warns(UserWarning, match="not in the optimizer"):
        updater = updater_of(model, Wide(compensated=True), optimizer=optimizer)
    updater.update(parts(), loss_sum, count=one)
    model.up.weight.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.down.parameters())})
    updater.update(parts(), loss_sum, count=one)
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    truth = []
    for p in model.parameters():
        total = torch.zeros_like(p, dtype=torch.float64)
        for part in parts():
            (grad,) = torch.autograd.grad(loss_sum(model, part), p, torch.tensor(1 / len(parts())))
            total += grad.double()
        truth.append(total)
    assert error_of(found, truth) < 2e-6


def test_a_hook_added_inside_a_window_changes_what_is_added() -> None:
    model = Held(1)
    numbers = [torch.tensor([x]) for x in (-2e8, 3.0, 1e8, 0.0)]
    for window in updater_of(model, Wide(compensated=True)).windows(numbers, size=4, count=one):
        for x in window:
            if window.index == 1:
                model.weight.register_hook(lambda grad: grad * 2.0)
            window.backward(held_loss(model, x))
        window.step()
    assert model.weight.grad.item() * 4 == 6.0


def test_what_a_caller_asks_autograd_for_is_not_taken_for_an_addition() -> None:
    class Asks(torch.autograd.Function):
        """Its backward takes the gradients of another loss, of the same weights."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, model: nn.Module, part: Part) -> Tensor:
            ctx.model, ctx.part = model, part
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            with torch.enable_grad():
                inner = loss_sum(ctx.model, ctx.part)
            found = torch.autograd.grad(inner, list(ctx.model.parameters()))
            return grads[0] + 0.0 * sum(g.sum() for g in found), None, None

    def loss(model: Any, part: Part) -> Tensor:
        torch.autograd.grad(loss_sum(model, part), list(model.parameters()))
        found: Tensor = Asks.apply(loss_sum(model, part), model, part)  # type: ignore[no-untyped-call]
        return found

    assert_gains(Words, loss)


def test_a_compiled_model() -> None:
    def compiled() -> nn.Module:
        model: Any = torch.compile(Words(), backend="aot_eager")
        return model

    assert_gains(compiled)


def test_a_compiled_model_is_compiled_once_for_all_microbatches() -> None:
    graphs = []

    def backend(graph: Any, example: Any) -> Any:
        del example
        graphs.append(graph)
        return graph

    model: Any = torch.compile(nn.Linear(4, 2), backend=backend)
    updater = updater_of(model, Wide(compensated=True))
    for _ in range(2):
        updater.update([torch.ones(2, 4)] * 3, held_loss, count=one)
    assert len(graphs) == 1


def test_observers_see_each_microbatch_as_without() -> None:
    found = []
    for accumulation in (None, Wide(compensated=True)):
        observers = [ms.observers.Microbatches()]
        updater = updater_of(Words(), accumulation, observers=observers)
        found.append(updater.update(parts(), loss_sum, count=one).extra["microbatch_grad_norms"])
    assert found[0] == found[1]
    assert len(found[0]) == len(parts())


def test_under_autocast() -> None:
    model = Words()
    updater = updater_of(model, Wide(compensated=True), precision=ms.BF16())
    updater.update(parts(), loss_sum, count=one)
    total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    twin = Words()
    for part in parts():
        twin.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_sum(twin, part)
        loss.backward(torch.tensor(1 / len(parts())))
        torch._foreach_add_(total, [p.grad.double() for p in twin.parameters()])
    assert error_of([p.grad for p in model.parameters()], total) < 2e-6


def test_float32_beside_half_precision_is_compensated_and_half_is_wide() -> None:
    model = nn.ModuleList([Held(1), Held(1, dtype=torch.bfloat16)])
    numbers = [1e8, 3.0, -1e8, *[1.0] * 509]  # in bfloat16 a sum of ones stalls at 256

    def loss(model: Any, x: float) -> Tensor:
        first = model[0](torch.tensor([x]))
        return (first + model[1](torch.ones(1, dtype=torch.bfloat16)).float()).sum()

    updater_of(model, Wide(compensated=True)).update(numbers, loss, count=one)
    assert [p.grad.item() * 512 for p in model.parameters()] == [math.fsum(numbers), 512.0]
    assert [p.grad.dtype for p in model.parameters()] == [torch.float32, torch.bfloat16]


@pytest.mark.filterwarnings("ignore:Out of memory with microbatches:UserWarning")
@pytest.mark.parametrize("where", [2, 4])
def test_a_window_that_ran_out_of_memory_is_summed_anew(where: int) -> None:
    model, count = Held(4), [0]

    def loss(model: Any, x: Tensor) -> Tensor:
        count[0] += 1
        if count[0] == where:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(x).sum()

    updater = updater_of(model, Wide(compensated=True))
    x = torch.tensor([[1e8], [3.0], [-1e8], [0.0], [1e8], [-1e8], [1.0], [0.0]]).expand(8, 4)
    for window in updater.windows([x], rows=ms.AutoRows(first=2), count=len):
        assert updater.update(window, loss).num_microbatches == 8
    assert torch.equal(model.weight.grad * 8, torch.full((4,), 4.0))


# -- what is refused ------------------------------------------------------------------------------


def test_who_writes_to_a_sum_inside_a_window_is_told() -> None:
    model = Held(1)
    numbers = [torch.tensor([x]) for x in (1e8, 3.0, -1e8, 0.0)]
    updater = updater_of(model, Wide(compensated=True))

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    handle = model.weight.register_post_accumulate_grad_hook(halve)
    with pytest.raises(ms.WindowError, match=r"written to `.grad` of `weight` inside"):
        updater.update(numbers, held_loss, count=one)
    handle.remove()
    assert model.weight.grad is None
    updater.update(numbers, held_loss, count=one)
    assert model.weight.grad.item() * 4 == 3.0


def test_who_writes_to_a_sum_after_the_last_backward_is_told() -> None:
    model = Held(1)
    ones = [torch.ones(1)] * 4
    for window in updater_of(model, Wide(compensated=True)).windows(ones, size=4, count=one):
        for x in window:
            window.backward(held_loss(model, x))
        model.weight.grad.zero_()
        with pytest.raises(ms.WindowError, match=r"or after `window.gradients_\(\)`"):
            window.step()


def test_who_puts_another_sum_in_its_place_is_told() -> None:
    model = Held(1)
    ones = [torch.ones(1)] * 3
    for window in updater_of(model, Wide(compensated=True)).windows(ones, size=3, count=one):
        for x in window:
            if window.is_last:
                # Written to as often as the sum before it was.
                model.weight.grad = torch.zeros(1).add_(5.0)
                with pytest.raises(ms.WindowError, match=r"written to `.grad` of `weight` inside"):
                    window.backward(held_loss(model, x))
            else:
                window.backward(held_loss(model, x))


def test_a_sum_may_be_changed_once_it_is_whole() -> None:
    model = Held(1)
    numbers = [torch.tensor([x]) for x in (1e8, 3.0, -1e8, 0.0)]
    for window in updater_of(model, Wide(compensated=True)).windows(numbers, size=4, count=one):
        for x in window:
            window.backward(held_loss(model, x))
        window.gradients_()
        model.weight.grad.mul_(2.0)
        window.step()
    assert model.weight.grad.item() * 4 == 6.0


def test_a_model_all_in_half_precision_is_refused() -> None:
    model = nn.Linear(2, 2).bfloat16()
    with pytest.raises(ValueError, match=r"every parameter is in half precision.*Pass `Wide\(\)`"):
        updater_of(model, Wide(compensated=True))


def test_sparse_gradients_are_refused() -> None:
    model = Words(sparse=True, tied=False)
    with pytest.raises(ValueError, match=r"sparse gradients, of `words`"):
        updater_of(model, Wide(compensated=True))


def test_a_sparse_gradient_that_nobody_announced_is_refused_when_it_arrives() -> None:
    weight = nn.Parameter(torch.zeros(11, 6))
    model = nn.ParameterList([weight])

    def loss(model: Any, ids: Tensor) -> Tensor:
        return F.embedding(ids, model[0], sparse=True).sum()

    updater = updater_of(model, Wide(compensated=True))
    with pytest.raises(ms.WindowError, match=r"of `0` is torch.sparse_coo"):
        updater.update([torch.ones(3, dtype=torch.int64)], loss, count=one)
    assert weight.grad is None


@pytest.mark.parametrize("value", [1, "yes", None])
def test_what_is_no_bool_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"compensated=.*is no bool"):
        Wide(compensated=value)


def test_it_says_what_it_is() -> None:
    assert repr(Wide(compensated=True)) == "Wide(compensated=True)"
