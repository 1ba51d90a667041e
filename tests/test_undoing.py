"""A step that runs out of memory anywhere ends as one that did not, or says that it is broken."""

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from shooting import Shooting
from torch import Tensor, nn

from midstep.errors import OutOfMemory
from midstep.undoing import StepGuard

pytestmark = pytest.mark.filterwarnings("ignore:Out of memory in the optimizer's step:UserWarning")

Make = Callable[[Sequence[dict[str, Any]]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD foreach": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True
    ),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adamax foreach": lambda p: torch.optim.Adamax(p, lr=0.1, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam foreach": lambda p: torch.optim.RAdam(p, lr=0.1, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.9),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "Adadelta foreach": lambda p: torch.optim.Adadelta(p, lr=0.1, foreach=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.1),
}


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """Each error collects garbage, which takes as long as there are objects to look at."""
    for make in OPTIMIZERS.values():
        Trained(make, 1).optimizer.step()  # imports all that a step needs
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(3, 4), (4, 4), (2, 3)]
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


class Trained:
    """Three matrices in two groups, and an optimizer."""

    def __init__(self, make: Make, num_steps: int) -> None:
        self.parameters = parameters()
        self.optimizer = make([{"params": self.parameters[:2]}, {"params": self.parameters[2:]}])
        for index in range(num_steps):
            self.gradients(index)
            self.optimizer.step()
        self.gradients(num_steps)

    def gradients(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in self.parameters:
            p.grad = torch.randn(p.shape, generator=generator)

    def ends(self) -> list[Any]:
        found: list[Any] = []
        for p in self.parameters:
            found += [p.detach(), *dict(sorted(self.optimizer.state.get(p, {}).items())).values()]
        return found


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(ours, theirs, strict=True)
    )


def shot_at(trained: Trained, *after: int, copies: bool = False) -> Shooting:
    guard = StepGuard(copies=copies, before=lambda: None)
    with Shooting(*after) as shooting:
        shooting.only_in(trained.optimizer)
        guard.take(trained.optimizer)
    return shooting


# They decide by a weight, or compute one from a running mean as it was before its own change.
READS_WHAT_IT_CHANGED = {"Adadelta foreach", "Adafactor", "ASGD"}


@pytest.mark.parametrize("num_steps", [0, 2], ids=["first step", "later step"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_error_before_any_operation_of_a_step_changes_no_bit(name: str, num_steps: int) -> None:
    calm = Trained(OPTIMIZERS[name], num_steps)
    with Shooting() as counting:
        counting.only_in(calm.optimizer)
        calm.optimizer.step()
    for place in range(counting.num_seen):
        hit = Trained(OPTIMIZERS[name], num_steps)
        try:
            shooting = shot_at(hit, place)
        except OutOfMemory:
            if name in READS_WHAT_IT_CHANGED:
                continue
            raise
        assert shooting.fired
        assert same(hit.ends(), calm.ends()), shooting.fired


@pytest.mark.parametrize("name", ["SGD foreach", "AdamW", "AdamW foreach", "AdamW fused"])
def test_a_step_is_finished_after_two_errors_too(name: str) -> None:
    calm = Trained(OPTIMIZERS[name], 1)
    calm.optimizer.step()
    for first in range(0, 20, 3):
        for second in range(0, 20, 3):
            hit = Trained(OPTIMIZERS[name], 1)
            shot_at(hit, first, second)
            assert same(hit.ends(), calm.ends()), (first, second)


@pytest.mark.parametrize("name", ["AdamW", "AdamW foreach"])
def test_a_copy_takes_a_step_back_as_a_whole(name: str) -> None:
    calm = Trained(OPTIMIZERS[name], 1)
    calm.optimizer.step()
    for place in range(12, 40, 5):
        hit = Trained(OPTIMIZERS[name], 1)
        shot_at(hit, place, copies=True)
        assert same(hit.ends(), calm.ends()), place


def test_a_first_step_goes_on_where_only_its_copy_does_not_fit() -> None:
    calm, hit = (Trained(OPTIMIZERS["AdamW"], 0) for _ in range(2))
    calm.optimizer.step()
    with Shooting(*[0] * 99) as shooting:
        shooting.only = "aten.clone"
        StepGuard(copies=False, before=lambda: None).take(hit.optimizer)
        with pytest.raises(torch.OutOfMemoryError):  # a copy that was asked for is not left out
            StepGuard(copies=True, before=lambda: None).take(hit.optimizer)
    assert shooting.fired
    assert same(hit.ends(), calm.ends())


def test_what_never_fits_and_wrote_nothing_is_as_before() -> None:
    hit = Trained(OPTIMIZERS["AdamW fused"], 1)
    before = copy.deepcopy(hit.ends())
    guard = StepGuard(copies=False, before=lambda: None)
    with Shooting(*[0] * 9) as shooting:
        shooting.only_in(hit.optimizer)
        with pytest.raises(torch.OutOfMemoryError):
            guard.take(hit.optimizer)
    assert not guard.is_begun
    assert same(hit.ends(), before)


def test_what_never_ends_after_it_has_written_is_told_with_the_bytes_of_a_copy() -> None:
    hit = Trained(OPTIMIZERS["AdamW"], 1)
    guard = StepGuard(copies=False, before=lambda: None)
    with Shooting(8, 8, 8), pytest.raises(OutOfMemory, match=r"guards_step=True.* of \d+ B"):
        guard.take(hit.optimizer)
    assert guard.is_begun


class Foreign(torch.optim.Optimizer):
    """Writes by a kernel that torch does not see, then runs out of memory."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.numpy()[...] = 0.0
        raise torch.OutOfMemoryError("CUDA out of memory: foreign")


def test_an_optimizer_whose_kernels_are_not_seen_is_told_unless_it_is_copied() -> None:
    def foreign(groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return Foreign(groups)

    hit = Trained(foreign, 0)
    before = copy.deepcopy(hit.ends())
    for copies in (False, True):  # the first step, which would make state, is copied anyway
        with pytest.raises(torch.OutOfMemoryError, match="foreign"):
            StepGuard(copies=copies, before=lambda: None).take(hit.optimizer)
        assert same(hit.ends(), before)
    for p in hit.parameters:
        hit.optimizer.state[p]["step"] = 1
    with pytest.raises(OutOfMemory, match="in the middle of an optimizer step"):
        StepGuard(copies=False, before=lambda: None).take(hit.optimizer)


class Restless(torch.optim.SGD):
    """Reads a weight after it has changed another by it, so it cannot be gone through again."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first, second = self.param_groups[0]["params"][:2]
        total = first.sum()
        first.add_(1.0)
        second.add_(total)


def test_a_step_that_reads_what_it_has_changed_is_told_and_not_repeated() -> None:
    hit = Trained(lambda p: Restless(p, lr=0.1), 0)
    with pytest.raises(OutOfMemory, match="in the middle of an optimizer step"):
        shot_at(hit, 2)  # before the second weight is written; the first has been


def test_an_error_of_another_kind_in_a_step_is_the_callers() -> None:
    class Faulty(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ZeroDivisionError

    hit = Trained(lambda p: Faulty(p, lr=0.1), 0)
    with pytest.raises(ZeroDivisionError):
        StepGuard(copies=False, before=lambda: None).take(hit.optimizer)
