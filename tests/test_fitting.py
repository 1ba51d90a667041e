"""Out of memory is not the end: the same gradient, one step, no lost and no repeated row."""

import copy
import dataclasses
import gc
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from plain_loop import Pair, classifier, distance, pairs, plain_update, weights
from shooting import Shooting
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import midstep as ms
from midstep.autorows import Fit, is_out_of_memory
from midstep.errors import OutOfMemory

pytestmark = [
    pytest.mark.filterwarnings("ignore:Out of memory with microbatches:UserWarning"),
    pytest.mark.filterwarnings("ignore:Out of memory in the optimizer's step:UserWarning"),
]

Model = nn.Sequential


def out_of_memory(where: str = "here") -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(f"CUDA out of memory: {where}")


def model(*, dropout: float = 0.0, norm: bool = False) -> Model:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(6))
    return Model(*layers).double()


def ends(trained: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in trained.state_dict().values()]


def same_bits(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def plain_loss(trained: nn.Module, batch: Pair) -> ms.LossSum:
    return ms.cross_entropy(trained(batch[0]), batch[1])


@dataclasses.dataclass
class Shot:
    """One injected error, at the n-th time that its place is reached."""

    place: str
    at: int = 0
    is_fired: bool = False

    def fire(self, place: str) -> None:
        if place != self.place or self.is_fired:
            return
        if self.at:
            self.at -= 1
            return
        self.is_fired = True
        raise out_of_memory(place)


class Clip(ms.ByGlobalNorm):
    """A rule that may run out of memory once it has changed something."""

    def shoot(self, shot: Shot) -> None:
        object.__setattr__(self, "_shot", shot)

    def decide(self, gradients: Any, attempt: Any) -> Any:
        decision = super().decide(gradients, attempt)
        shot = getattr(self, "_shot", None)
        if shot is not None:
            if shot.place == "clip":
                gradients.apply_()
            shot.fire("clip")
        return decision


class Optimizer(torch.optim.AdamW):
    """One whose step may be broken off before it, between two parameters, or after the last."""

    shot: Shot | None = None
    num_whole = 0

    def step(self, closure: Any = None) -> None:
        if self.shot is not None:
            self.shot.fire("before the step")
            if self.shot.place == "within the step" and not self.shot.is_fired:
                groups = self.param_groups
                first = [{**group, "params": group["params"][:1]} for group in groups]
                self.param_groups = first
                try:
                    super().step()
                finally:
                    self.param_groups = groups
                self.shot.fire("within the step")
        super().step()
        self.num_whole += 1


@dataclasses.dataclass
class Run:
    """A training run that may be shot at."""

    rows: Any
    shot: Shot | None = None
    dropout: float = 0.0
    norm: bool = False
    counted: bool = True
    precision: Any = None
    seen: list[float] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = model(dropout=self.dropout, norm=self.norm)
        self.optimizer = Optimizer(self.model.parameters(), lr=0.05, weight_decay=0.1)
        self.optimizer.shot = self.shot
        clip = Clip(0.1)
        if self.shot is not None:
            clip.shoot(self.shot)
        self.updater = ms.Updater(self.model, self.optimizer, clip=clip)
        self.passes: list[list[float]] = []

    def loss(self, trained: Model, batch: Pair) -> ms.LossSum:
        self.passes[-1].extend(batch[0][:, 0].tolist())
        if self.shot is not None:
            self.shot.fire("forward")
        hidden = trained[:-1](batch[0])
        if self.shot is not None:
            shot = self.shot

            def fire(_: Tensor) -> None:
                shot.fire("backward")

            hidden.register_hook(fire)
        return ms.cross_entropy(trained[-1](hidden), batch[1])

    def go(self, batches: list[Pair]) -> list[ms.UpdateRecord]:
        torch.manual_seed(3)
        records = []
        count = ms.targets() if self.counted else None
        for window in self.updater.windows(batches, rows=self.rows, count=count):
            self.passes.append([])
            records.append(self.updater.update(window, self.loss))
        return records


PLACES = [
    ("forward", 0),
    ("forward", 1),
    ("backward", 0),
    ("backward", 1),
    ("clip", 0),
    ("before the step", 0),
    ("within the step", 0),
]


IN_THE_STEP = {"before the step", "within the step"}


@pytest.mark.parametrize(("place", "at"), PLACES)
@pytest.mark.parametrize("counted", [True, False])
def test_an_error_anywhere_ends_as_the_smaller_microbatch_does_without_it(
    place: str, at: int, counted: bool
) -> None:
    batches = pairs(8, 8)
    first = 8 if at == 0 else 4
    shot = Shot(place, at)
    hit = Run(ms.AutoRows(first=first), shot, dropout=0.3, norm=True, counted=counted)
    records = hit.go(batches)
    rows = first if place in IN_THE_STEP else first // 2  # a step is finished as it is
    calm = Run(rows, dropout=0.3, norm=True, counted=counted)
    expected = calm.go(batches)
    assert shot.is_fired
    assert same_bits(ends(hit.model), ends(calm.model))
    assert [r.num_microbatches for r in records] == [8 // rows] * 2
    assert [(r.loss_mean, r.grad_norm, r.step) for r in records] == [
        (r.loss_mean, r.grad_norm, r.step) for r in expected
    ]
    assert hit.optimizer.num_whole == 2
    assert hit.updater.clock == calm.updater.clock
    for seen, (x, _) in zip(hit.passes, batches, strict=True):
        assert seen[-8:] == x[:, 0].tolist()


@pytest.mark.parametrize("norm", [False, True])
def test_without_an_error_it_is_the_whole_batch(norm: bool) -> None:
    batches = pairs(7, 5)
    found, whole = Run(ms.AutoRows(), norm=norm), Run(100, norm=norm)
    found.go(batches)
    whole.go(batches)
    assert same_bits(ends(found.model), ends(whole.model))


@pytest.fixture
def small_heap() -> Iterator[None]:
    """Each recovery collects garbage, which takes as long as there are objects to look at."""
    Run(8).go(pairs(8))  # imports all that a step needs
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("foreach", [False, True])
def test_a_thousand_random_errors_lose_no_row_and_take_no_second_step(foreach: bool) -> None:
    """At any operation that any kernel is asked for, from the first forward to the last write."""
    chance = random.Random(7)
    batches = pairs(*(chance.randint(2, 9) for _ in range(500)))
    ours, theirs = classifier(), classifier()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01, foreach=foreach)
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    num_whole = 0

    def note_whole(*_: Any) -> None:
        nonlocal num_whole
        num_whole += 1
        shooting.is_on = False  # what comes after a step cannot be run again

    optimizer.register_step_post_hook(note_whole)
    updater = ms.Updater(ours, optimizer, clip=ms.ByGlobalNorm(0.5))
    shooting = Shooting()
    shooting.is_on = False
    passes: list[list[float]] = []

    def loss(trained: Model, batch: Pair) -> Tensor:
        shooting.is_on = True
        passes[-1].extend(batch[0][:, 0].tolist())
        return F.cross_entropy(trained(batch[0]), batch[1], reduction="sum")

    kinds: dict[str, int] = {}
    windows = updater.windows(batches, rows=ms.AutoRows(grow_after=1), count=ms.targets())
    for window, (x, y) in zip(windows, batches, strict=True):
        updater._feed.fit.rows = None  # begin with the whole batch
        shooting.after, shooting.num_seen = [chance.randint(0, 60 if foreach else 90)], 0
        passes.append([])
        with shooting:
            record = updater.update(window, loss)
        shooting.is_on = False
        assert record.applied
        assert passes[-1][-len(x) :] == x[:, 0].tolist()
        plain_update(theirs, plain, F.cross_entropy(theirs(x), y), 0.5)
        for name in shooting.fired:
            kinds[name] = kinds.get(name, 0) + 1
        shooting.fired.clear()
    assert sum(kinds.values()) > 450
    assert len(kinds) > 20, kinds  # forward, loss, backward, norm, clip and step alike
    assert updater.clock.step == num_whole == 500
    assert distance(weights(ours), weights(theirs)) < 1e-9


def test_several_errors_in_one_window_halve_again_and_again() -> None:
    batches = pairs(16)
    hit, calm = Run(ms.AutoRows()), Run(2)
    limit = 2

    def loss(trained: Model, batch: Pair) -> ms.LossSum:
        if len(batch[0]) > limit:
            raise MemoryError
        return plain_loss(trained, batch)

    torch.manual_seed(3)
    told = pytest.warns(UserWarning, match="microbatches of 16 rows")
    with told as said:
        for window in hit.updater.windows(batches, rows=ms.AutoRows(), count=ms.targets()):
            hit.updater.update(window, loss)
    calm.go(batches)
    assert same_bits(ends(hit.model), ends(calm.model))
    assert len(said) == 3


def test_a_row_that_does_not_fit_is_an_error_and_everything_is_as_it_was() -> None:
    run = Run(ms.AutoRows(), dropout=0.3, norm=True)
    before = ends(run.model)
    torch.manual_seed(1)
    draws = torch.get_rng_state()

    def loss(trained: Model, batch: Pair) -> ms.LossSum:
        trained(batch[0].repeat(2, 1)).sum().backward()  # leaves gradients and statistics
        raise out_of_memory("always")

    for window in run.updater.windows(pairs(4), rows=ms.AutoRows(), count=ms.targets()):
        with pytest.raises(OutOfMemory, match="one row fits: CUDA out of memory: always"):
            run.updater.update(window, loss)
    assert same_bits(ends(run.model), before)
    assert torch.equal(torch.get_rng_state(), draws)
    assert all(p.grad is None for p in run.model.parameters())
    assert run.updater.clock.update == 0


def test_an_error_of_another_kind_is_not_swallowed() -> None:
    run = Run(ms.AutoRows())

    def loss(_trained: Model, _batch: Pair) -> ms.LossSum:
        raise ZeroDivisionError

    for window in run.updater.windows(pairs(4), rows=ms.AutoRows(), count=ms.targets()):
        with pytest.raises(ZeroDivisionError):
            run.updater.update(window, loss)
    assert run.updater.state_dict()["fit"]["rows"] is None


def test_a_step_that_was_taken_is_never_taken_again() -> None:
    class Greedy(AveragedModel):
        def update_parameters(self, trained: nn.Module) -> None:
            raise out_of_memory("after the step")

    trained = model()
    optimizer = Optimizer(trained.parameters(), lr=0.05)
    updater = ms.Updater(trained, optimizer, averaged_model=Greedy(trained))
    for window in updater.windows(pairs(8), rows=ms.AutoRows(), count=ms.targets()):
        with pytest.raises(torch.OutOfMemoryError, match="after the step"):
            updater.update(window, plain_loss)
    assert optimizer.num_whole == 1


def test_a_step_is_finished_and_told_and_the_size_stays() -> None:
    hit, calm = Run(ms.AutoRows()), Run(8)
    for run in (hit, calm):
        run.go(pairs(4))
    hit.optimizer.shot = Shot("within the step")
    with pytest.warns(UserWarning, match="optimizer's step .* was finished"):
        (record,) = hit.go(pairs(8, seed=2))
    calm.go(pairs(8, seed=2))
    assert record.num_microbatches == 1
    assert same_bits(ends(hit.model), ends(calm.model))
    assert hit.optimizer.num_whole == calm.optimizer.num_whole == 2


def test_the_size_found_is_kept_grows_back_and_waits_longer_after_each_error() -> None:
    sizes: list[int] = []
    limit = 4

    def loss(trained: Model, batch: Pair) -> ms.LossSum:
        sizes[-1] = max(sizes[-1], len(batch[0]))
        if len(batch[0]) > limit:
            raise out_of_memory()
        return plain_loss(trained, batch)

    trained = model()
    updater = ms.Updater(trained, torch.optim.SGD(trained.parameters(), lr=0.1))
    tried = []
    windows = updater.windows(pairs(*[16] * 20), rows=ms.AutoRows(grow_after=2), count=ms.targets())
    for window in windows:
        sizes.append(0)
        record = updater.update(window, loss)
        assert record.num_microbatches == 4
        tried.append(sizes[-1])
    # 16 fails and 8 fails; so twice two doublings of the wait are over before 8 is tried again.
    assert tried == [16, *[4] * 7, 8, *[4] * 11]


def test_the_size_found_is_saved_and_resumed() -> None:
    hit = Run(ms.AutoRows(), Shot("forward"))
    hit.go(pairs(8))
    state = copy.deepcopy(hit.updater.state_dict())
    assert state["fit"]["rows"] == 4
    resumed = Run(ms.AutoRows())
    resumed.updater.load_state_dict({**state, "cursor": None})
    (record,) = resumed.go(pairs(8))
    assert record.num_microbatches == 2


def test_a_state_from_before_there_was_a_size_loads() -> None:
    run = Run(ms.AutoRows())
    state = dict(run.updater.state_dict())
    del state["fit"]
    run.updater.load_state_dict(state)


def test_a_loop_of_ones_own_cannot_be_run_again_and_is_refused() -> None:
    run = Run(ms.AutoRows())
    for window in run.updater.windows(pairs(4), rows=ms.AutoRows(), count=ms.targets()):
        with pytest.raises(ms.WindowError, match="Hand the window"):
            list(window)


@pytest.mark.parametrize("settings", [{"first": 0}, {"grow_after": 0}], ids=str)
def test_sizes_below_one_are_refused(settings: Mapping[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ms.AutoRows(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings", [{"first": 2.5}, {"first": "4"}, {"first": True}, {"guards_step": None}], ids=str
)
def test_what_is_no_number_is_refused_at_construction(settings: Mapping[str, Any]) -> None:
    with pytest.raises(TypeError, match="whole numbers"):
        ms.AutoRows(**settings)


def test_a_size_may_stay_where_it_was_found() -> None:
    fit, auto = Fit(), ms.AutoRows(grow_after=None)
    assert fit.shrink(9) == 5
    for _ in range(1000):
        fit.note_good(64, auto)
    assert fit.rows_for(64, auto) == 5
    assert fit.rows_for(3, auto) == 3


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
        RuntimeError("MPS backend out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    ],
    ids=str,
)
def test_what_allocators_say_is_understood(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_out_of_memory(ValueError(str(error)))


def test_a_wider_loss_term_is_exact_too() -> None:
    def terms(trained: nn.Module, batch: Pair) -> dict[str, Any]:
        if len(batch[0]) > 3:
            raise out_of_memory()
        logits = trained(batch[0])
        return {
            "lm": ms.cross_entropy(logits, batch[1]),
            "size": ms.LossSum(logits.square().sum(), len(batch[0])),
        }

    def counts(batch: Pair) -> dict[str, float]:
        return {"lm": ms.targets()(batch), "size": len(batch[0])}

    trained, whole = model(), model()
    (batch,) = pairs(11)
    updater = ms.Updater(trained, torch.optim.SGD(trained.parameters(), lr=0.1))
    for window in updater.windows([batch], rows=ms.AutoRows(), count=counts):
        updater.update(window, terms)
    logits = whole(batch[0])
    (F.cross_entropy(logits, batch[1]) + logits.square().sum() / 11).backward()
    ours = [p.grad for p in trained.parameters() if p.grad is not None]
    theirs = [p.grad for p in whole.parameters() if p.grad is not None]
    assert distance(ours, theirs) < 1e-12


REAL_LIMIT = """
    import resource, warnings
    import torch
    import midstep as ms

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    WIDTH = 1 << 16  # one row holds 256 kB at a time, three times over

    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.linspace(-1, 1, WIDTH))

        def forward(self, x):
            return (x * self.weight).sin().exp().mean(1)

    def train(rows, limit):
        model = Wide()
        updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.linspace(0, 1, 128)[:, None]
        if limit:
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), -1))
        for window in updater.windows([x], rows=rows, count=len):
            record = updater.update(window, lambda model, x: model(x).sum())
        return model.weight.detach().clone(), record

    train(8, False)  # whatever is made once
    found, record = train(ms.AutoRows(), True)
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    rows = 128 // record.num_microbatches
    calm, _ = train(rows, False)
    whole, _ = train(128, False)
    assert 1 < record.num_microbatches < 128, record
    assert torch.equal(found, calm)
    assert (found - whole).abs().max() < 1e-6
    print(rows)
"""


def test_a_real_limit_of_the_process_is_survived() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REAL_LIMIT)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 128


REAL_LIMIT_OF_A_STEP = """
    import gc, resource, warnings
    from pathlib import Path
    import torch
    import midstep as ms

    torch.set_num_threads(1)
    SIZE = 9 << 20  # 36 MB a tensor, which an allocator gives back at once

    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.linspace(-1, 1, SIZE))

        def forward(self, x):
            return (x * self.weight).square().sum()

    def train(foreach, limited):
        model = Scale()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
        updater = ms.Updater(model, optimizer)
        told = []
        for index, window in enumerate(
            updater.windows([torch.ones(1, 1)] * 3, rows=ms.AutoRows(), count=len)
        ):
            if limited and index == 1:
                def hold(*_):
                    handle.remove()
                    cycle = [torch.empty(3 * SIZE)]  # 108 MB that only a collection lets go of
                    cycle.append(cycle)
                    used = int(Path("/proc/self/statm").read_text().split()[0])
                    limit = used * resource.getpagesize() + (16 << 20)
                    resource.setrlimit(resource.RLIMIT_AS, (limit, -1))

                handle = optimizer.register_step_pre_hook(hold)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                updater.update(window, lambda model, x: model(x))
            told += [str(w.message) for w in caught]
            if limited and index == 1:
                resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        return model.weight.detach().clone(), told

    gc.disable()
    train(False, False)  # whatever is made once
    for foreach in (False, True):
        found, told = train(foreach, True)
        calm, _ = train(foreach, False)
        assert torch.equal(found, calm)
        assert len(told) == 1 and "optimizer's step" in told[0] and "allocate" in told[0], told
"""


def test_a_real_limit_within_a_step_is_survived_by_the_same_step() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REAL_LIMIT_OF_A_STEP)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_decay_exponent_is_the_sum_of_rate_times_decay_over_applied_updates() -> None:
    trained = model()
    weight, *others = trained.parameters()
    groups = [{"params": [weight], "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    updater = ms.Updater(
        trained, optimizer, schedule=ms.schedules.linear(total=4), empty=ms.Skip(max_consecutive=1)
    )
    nothing = (torch.ones(2, 4, dtype=torch.float64), torch.full((2,), -100))
    batches = [*pairs(3, 3), nothing, *pairs(3)]
    records = [
        updater.update(window, plain_loss)
        for window in updater.windows(batches, size=1, count=ms.targets())
    ]
    expected, total = [], 0.0
    for record in records:
        if record.applied:
            total += record.lr[0] * 0.1
        expected.append([total, 0.0])
    assert [record.extra["decay_exponent"] for record in records] == expected
    assert records[2].extra["decay_exponent"] == records[1].extra["decay_exponent"]
    again = ms.Updater(trained, optimizer)
    again.load_state_dict(updater.state_dict())
    record = again.update(pairs(3), plain_loss, count=ms.targets())
    assert record.extra["decay_exponent"][0] == pytest.approx(total + record.lr[0] * 0.1)


def test_a_run_without_decay_has_no_exponent() -> None:
    trained = model()
    updater = ms.Updater(trained, torch.optim.SGD(trained.parameters(), lr=0.1))
    record = updater.update(pairs(3), plain_loss, count=ms.targets())
    assert "decay_exponent" not in record.extra
