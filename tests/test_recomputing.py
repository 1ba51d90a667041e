"""Recompute: the same outputs, gradients, draws and buffers, for less held in forward."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import midstep as ms
from midstep.planning import parity, peak_of
from midstep.recomputing import recompute, repeated_blocks


class Block(nn.Module):
    def __init__(self, width: int, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return x + (h if mask is None else h * mask)


class Stack(nn.Module):
    """Calls its blocks one by one; with `between`, it also computes between them."""

    def __init__(self, depth: int = 7, *, between: bool = False, **settings: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.layers = nn.ModuleList(Block(8, **settings) for _ in range(depth))
        self.last = nn.Linear(8, 1)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        mask, seen = (x > 0).to(x.dtype), []
        for layer in self.layers:
            x = layer(x, mask=mask)
            if self.between:
                seen.append(x.sin())
                x = x * 1.5
        y: Tensor = self.last(x)
        return y + sum(s.sum(-1, keepdim=True) for s in seen)


def stack(seed: int = 0, **settings: Any) -> Stack:
    torch.manual_seed(seed)
    return Stack(**settings).double()


def rows() -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def run(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    torch.manual_seed(11)
    out = model(x)
    out.square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return out.detach(), grads, torch.rand(3)


def same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> bool:
    return (
        torch.equal(ours[0], theirs[0])
        and all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))
        and torch.equal(ours[2], theirs[2])
    )


@pytest.mark.parametrize("every", [1, 2, 3, 5, 7, 9])
@pytest.mark.parametrize("between", [False, True])
def test_outputs_gradients_and_draws_are_the_same_bits(every: int, between: bool) -> None:
    model, x = stack(between=between), rows()
    plain = run(copy.deepcopy(model), x)
    with recompute(model, every=every):
        assert same(run(model, x), plain)
    assert same(run(model, x), plain)  # and it is undone


@pytest.mark.parametrize("every", [1, 3])
def test_batch_norm_counts_each_batch_once_and_it_is_told(every: int) -> None:
    model, x = stack(norm=nn.BatchNorm1d), rows()
    twin = copy.deepcopy(model)
    plain = run(twin, x)
    with (
        recompute(model, every=every),
        pytest.warns(UserWarning, match=r"layers\.0\.norm\.running"),
    ):
        assert same(run(model, x), plain)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_without_a_changing_buffer_nothing_is_warned() -> None:
    with warnings.catch_warnings(), recompute(model := stack()):
        warnings.simplefilter("error")
        run(model, rows())


def test_the_control_without_random_state_has_other_gradients() -> None:
    # If this passed, the tests above would say nothing about dropout.
    model, x = stack(depth=1), rows()
    plain = run(model, x)
    block = model.layers[0]
    forward = block.forward
    block.forward = lambda x, mask: checkpoint(  # type: ignore[method-assign]
        forward, x, mask, use_reentrant=False, preserve_rng_state=False
    )
    assert not same(run(model, x), plain)


def held_by(model: nn.Module, x: Tensor) -> int:
    """Bytes that a forward leaves behind for its backward."""
    model.zero_grad()
    kept: list[Tensor] = []
    return peak_of(lambda: kept.append(model(x).sum())).kept_bytes


def test_of_l_blocks_only_every_kth_input_is_held() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)))
    x = torch.randn(128, 64)
    part = x.numel() * 4
    plain = held_by(model, x)
    assert plain == pytest.approx(12 * part, rel=0.02)  # Linear saves its input, Tanh its output
    for every in (1, 2, 3, 6):
        with recompute(model, every=every):
            # The inputs of all runs but the first, which is the caller's, and a random state each.
            expected = (12 / every - 1) * part + 12 / every * 5056
            assert held_by(model, x) == pytest.approx(expected, rel=0.01)


def test_the_peak_of_forward_and_backward_falls() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)))
    x = torch.randn(512, 64)

    def step() -> None:
        model(x).sum().backward()

    plain = peak_of(step).num_bytes
    model.zero_grad()
    with recompute(model, every=3):
        assert peak_of(step).num_bytes < 0.7 * plain


def test_autocast_is_that_of_the_first_run() -> None:
    torch.manual_seed(0)
    model, x = Stack(depth=4), rows().float()

    def grads() -> list[Tensor]:
        torch.manual_seed(11)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).sum()
        loss.backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return found

    plain = grads()
    with recompute(model, every=2):
        assert all(torch.equal(a, b) for a, b in zip(grads(), plain, strict=True))


def test_an_error_in_a_block_leaves_no_hook_behind() -> None:
    model, x = stack(), rows()
    plain = run(model, x)
    with recompute(model, every=3):

        def fail(*_: object) -> None:
            raise MemoryError("no more")

        handle = model.layers[4].up.register_forward_hook(fail)
        with pytest.raises(MemoryError):
            model(x)
        handle.remove()
        assert same(run(model, x), plain)


def test_without_gradients_nothing_is_done() -> None:
    model, x = stack().eval(), rows()
    with torch.no_grad():
        plain = model(x)
        with recompute(model, every=2):
            assert torch.equal(model(x), plain)
    assert not plain.requires_grad


def test_a_block_that_is_called_many_times_is_a_list_of_one() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.last = Block(4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(5):
                x = self.block(x)
            y: Tensor = self.last(x)
            return y

    torch.manual_seed(0)
    model, x = Shared().double(), rows()
    plain = run(model, x)
    with recompute(model, every=2, blocks=[model.block]):
        assert same(run(model, x), plain)


def test_blocks_that_are_skipped_now_and_then_do_not_matter() -> None:
    class Dropped(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for index, layer in enumerate(self.layers):
                if index not in {2, 6}:
                    x = layer(x)
            y: Tensor = self.last(x)
            return y

    torch.manual_seed(0)
    model, x = Dropped(7).double(), rows()
    plain = run(model, x)
    with recompute(model, every=3):
        assert same(run(model, x), plain)
        assert same(run(model, x), plain)


def test_an_argument_changed_in_place_afterwards_is_an_error_and_no_wrong_gradient() -> None:
    class Careless(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            masks = [torch.ones(8, dtype=x.dtype) for _ in self.layers]
            for layer, mask in zip(self.layers, masks, strict=True):
                x = layer(x, mask=mask)
            masks[1].mul_(2.0)  # of the second block of a run: the first one's torch looks after
            y: Tensor = self.last(x)
            return y

    torch.manual_seed(0)
    model = Careless(4).double()
    with (
        recompute(model, every=2),
        pytest.raises(RuntimeError, match="changed in place"),
    ):
        run(model, rows())


def test_a_second_backward_and_a_second_derivative_are_the_same() -> None:
    x = rows()

    def derivatives(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        loss = model(x).square().sum()
        parameters = list(model.parameters())
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), parameters)
        return [*first, *second]

    model = stack(depth=3)
    plain = derivatives(model)
    with recompute(model, every=2):
        found = derivatives(model)
    assert max((a - b).abs().max().item() for a, b in zip(plain, found, strict=True)) < 1e-12


def test_an_update_with_recompute_is_the_update_without() -> None:
    x = [torch.randn(3, 4, dtype=torch.float64) for _ in range(4)]
    weights = []
    for every in (None, 2):
        model = stack()
        if every is not None:
            recompute(model, every=every)
        updater = ms.Updater(
            model, torch.optim.AdamW(model.parameters()), clip=ms.ByGlobalNorm(0.1)
        )
        torch.manual_seed(2)
        updater.update(x, lambda model, batch: model(batch).square().sum(), count=len)
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_names_and_state_stay() -> None:
    model = stack()
    before = list(model.state_dict())
    with recompute(model):
        assert list(model.state_dict()) == before


def test_parity_measures_all_four_and_leaves_no_trace() -> None:
    model, x = stack(norm=nn.BatchNorm1d), rows()
    before = [t.clone() for t in model.state_dict().values()]
    torch.manual_seed(4)
    expected = torch.rand(2)
    torch.manual_seed(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = parity(model, lambda model: model(x).square().sum(), every=2)
    assert found == {"loss": 0.0, "draws": 0.0, "gradients": 0.0, "buffers": 0.0}
    assert torch.equal(torch.rand(2), expected)
    after = model.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_lists_inside_blocks_and_lists_of_unlike_parts_are_no_blocks() -> None:
    model = nn.ModuleDict(
        {
            "encoder": nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in "ab"),
            "head": nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
            "drops": nn.Sequential(nn.Dropout(), nn.Dropout()),
        }
    )
    assert list(repeated_blocks(model)) == ["encoder.0", "encoder.1"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "at least 1"),
        ({"every": True}, "at least 1"),
        ({"blocks": [nn.Linear(1, 1)]}, "is a part of"),
        ({"blocks": []}, "no block"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recompute(stack(), **settings)


def test_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks="):
        recompute(nn.Linear(2, 2))


def test_recompute_is_applied_once_to_a_model_by_whole_numbers() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    with recompute(blocks), pytest.raises(ValueError, match="applied to this model already"):
        recompute(blocks)
    for wrong in (2.5, "2", 0, True):
        with pytest.raises(ValueError, match="whole number"):
            recompute(blocks, every=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"no `torch\.nn\.Module`"):
        recompute("blocks")  # type: ignore[arg-type]
