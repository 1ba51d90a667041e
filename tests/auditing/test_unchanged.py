"""Watching changes nothing: neither a bit of the training, nor torch itself."""

import contextlib
import inspect
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import midstep as ms
from midstep.auditing.recorder.watching import watch

KINDS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "closure": lambda params: torch.optim.LBFGS(params, max_iter=4),
    "float16": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "bfloat16": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


class Net(nn.Module):
    """Batch statistics, dropout and a recomputed block: whatever a stray draw would change."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.3))
        self.block = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.2))
        self.last = nn.Linear(32, 3)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.block, self.first(x), use_reentrant=False)
        logits: Tensor = self.last(hidden)
        return logits.float()


def train(kind: str) -> dict[str, Tensor]:
    """Everything that a run leaves behind."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model = Net(dtype)
    optimizer = KINDS[kind](list(model.parameters()))
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 24)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "float16")
    data = TensorDataset(torch.randn(128, 8), torch.randint(3, (128,)))
    losses = []
    for _ in range(3):
        for i, (x, y) in enumerate(DataLoader(data, batch_size=8, shuffle=True)):

            def loss(x: Tensor = x, y: Tensor = y) -> Tensor:
                with torch.autocast("cpu", torch.float16, enabled=kind == "float16"):
                    return nn.functional.cross_entropy(model(x.to(dtype)), y) / 4

            def closure(loss: Callable[[], Tensor] = loss) -> Tensor:
                optimizer.zero_grad()
                value = loss()
                value.backward()
                return value

            if kind == "closure":
                losses.append(optimizer.step(closure).item())
                continue
            value = loss()
            scaler.scale(value).backward()
            losses.append(value.item())
            if i % 4 == 3:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
                optimizer.zero_grad()
    state = {**model.state_dict(), "random": torch.get_rng_state(), "losses": torch.tensor(losses)}
    moments = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return {**state, **{f"moment {n}": v for n, v in enumerate(moments)}}


@pytest.mark.parametrize("kind", KINDS)
def test_the_training_is_the_same_bit_for_bit(kind: str) -> None:
    plain = train(kind)
    with watch() as recorder:
        seen = train(kind)
    assert recorder.num_updates > 0
    assert recorder.num_unmeasured == 0
    assert plain.keys() == seen.keys()
    assert all(torch.equal(plain[name], seen[name]) for name in plain)


PATCHED = (
    *(torch.Tensor, nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, torch.autograd),
    *(torch.nn.utils, torch.nn.utils.clip_grad, torch.utils.checkpoint, torch.distributed, torch),
    *(lr_scheduler.LRScheduler, lr_scheduler.SequentialLR, nn.BatchNorm1d, DataLoader),
    *(nn.parallel.DistributedDataParallel, torch.autograd.graph),
)


def names_of_torch() -> dict[tuple[int, str], int]:
    return {(n, k): id(v) for n, owner in enumerate(PATCHED) for k, v in vars(owner).items()}


def test_torch_is_as_it_was_after_the_block() -> None:
    before = names_of_torch()
    with watch():
        assert names_of_torch() != before
    assert names_of_torch() == before


def test_torch_is_as_it_was_after_an_exception() -> None:
    before = names_of_torch()
    with pytest.raises(ZeroDivisionError), watch():
        _ = 1 / 0
    assert names_of_torch() == before


def test_what_was_imported_in_the_block_is_put_back_too() -> None:
    with watch():
        globals()["clip"] = torch.nn.utils.clip_grad_norm_
    assert globals().pop("clip") is torch.nn.utils.clip_grad_norm_


def test_watched_functions_keep_their_names_and_signatures() -> None:
    functions = (
        torch.nn.utils.clip_grad_norm_,
        torch.optim.Optimizer.zero_grad,
        torch.amp.GradScaler.step,
        lr_scheduler.StepLR.step,
        nn.Module.to,
    )
    signatures = [inspect.signature(function) for function in functions]
    with watch():
        seen = (
            torch.nn.utils.clip_grad_norm_,
            torch.optim.Optimizer.zero_grad,
            torch.amp.GradScaler.step,
            lr_scheduler.StepLR.step,
            nn.Module.to,
        )
        assert [inspect.signature(function) for function in seen] == signatures
        assert [f.__name__ for f in seen] == [f.__name__ for f in functions]


@contextlib.contextmanager
def loop_of(num_steps: int) -> Iterator[nn.Linear]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        model(torch.ones(4, 2)).mean().backward()
        optimizer.step()
    yield model


def test_findings_are_kept_when_the_block_raises() -> None:
    with (
        pytest.raises(KeyError, match="the user's own"),
        ms.audit() as found,
        loop_of(3),
    ):
        raise KeyError("the user's own")
    assert [finding.defect.code for finding in found.findings] == ["MS109"]
    assert found.num_updates == 3


def test_watching_ends_after_the_windows_that_were_asked_for() -> None:
    with ms.audit(windows=2) as found, loop_of(5):
        pass
    assert found.num_updates == 2


def test_optimizers_made_before_the_block_are_watched() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ms.audit() as found:
        for _ in range(3):
            model(torch.ones(4, 2)).mean().backward()
            optimizer.step()
    assert [finding.defect.code for finding in found.findings] == ["MS109"]


def test_a_pattern_that_names_no_defect_is_refused() -> None:
    with pytest.raises(ValueError, match="`MS999` names no defect"), ms.audit(select=["MS999"]):
        pass


def test_no_window_to_watch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"), ms.audit(windows=0):
        pass
