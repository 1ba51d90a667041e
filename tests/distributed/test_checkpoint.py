"""Checkpoints of many ranks: the continued run is the uninterrupted run, on however many ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.jobs import NAME, NUM_ROWS, Job, bits, everything, loss, oracle, rows
from distributed.models import worst
from distributed.processes import run
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import midstep as ms

pytestmark = pytest.mark.distributed


# -- another number of ranks ---------------------------------------------------------------------


def leg(rank: int, size: int, kind: str, folder: str) -> tuple[int, list[Tensor]]:
    """Go on where the last leg stopped, for one window."""
    del rank, size
    job = Job(kind, perturbed=True)
    ms.load(Path(folder) / NAME, job.updater)
    job.train(job.step + 1)
    ms.save(Path(folder) / NAME, job.updater)
    return job.step, job.weights()


# Kind and number of ranks, one window each; a pass has three. The first is one process.
RELAYS = {
    "DDP": [("DDP", 2), ("DDP", 4), ("DDP", 2), ("plain", 1), ("DDP", 4), ("plain", 1)],
    "FSDP2": [("FSDP2", 2), ("FSDP2", 4), ("FSDP2", 2), ("plain", 1), ("FSDP2", 1), ("DDP", 2)],
    "mixed": [("HSDP", 4), ("TP", 2), ("FSDP2 x TP", 4), ("DDP", 2), ("FSDP2", 4), ("TP", 2)],
}


@pytest.mark.parametrize("name", RELAYS)
def test_a_run_goes_on_with_any_number_of_ranks_and_in_any_wrapping(
    name: str, tmp_path: Path
) -> None:
    wanted = oracle(len(RELAYS[name]) + 1)
    job = Job("plain")
    job.train(1)
    ms.save(tmp_path / NAME, job.updater)
    for before, (kind, size) in enumerate(RELAYS[name], start=1):
        if kind == "plain":
            found = [leg(0, 1, kind, str(tmp_path))]
        else:
            found = run(leg, kind, str(tmp_path), size=size)
        for rank, (step, after) in enumerate(found):
            assert step == before + 1
            assert worst(after, wanted[before]) < 1e-12, f"{kind} on {size}, rank {rank}"
        assert (tmp_path / NAME).is_dir() == (size > 1)
    assert [entry.name for entry in tmp_path.iterdir()] == [NAME]


# -- the same number of ranks --------------------------------------------------------------------


class Noisy:
    """A run that draws on every stream: dropout, an order and rows of each rank's own, overflows.

    Its BatchNorm has seen other rows on every rank.
    """

    def __init__(self, kind: str, *, seed: int, streamed: bool) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(
            nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.ReLU(), nn.Linear(7, 3)
        )
        average = AveragedModel(model, use_buffers=True) if kind == "DDP" else None
        if kind == "DDP":
            model = DistributedDataParallel(model)
        else:
            shape = (size,) if kind == "FSDP2" else (2, size // 2)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :])
            for layer in (model[0], model[1], model[4], model):  # type: ignore[index]
                fully_shard(layer, mesh=mesh)
        self.updater = ms.Updater(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.01),
            clip=ms.Chain(ms.ByTensorAverage(warmup=2), ms.ByGlobalNorm(0.5)),
            precision=ms.FP16(init_scale=2.0**17, growth_interval=2),
            averaged_model=average,
        )
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(26, 5, generator=generator)
        data = TensorDataset(x, torch.randint(0, 3, (26,), generator=generator))
        order = torch.Generator().manual_seed(100 * seed + rank)
        self.loader = DataLoader(data, 2, sampler=RandomSampler(data, generator=order))
        self.count = None if streamed else ms.targets()
        torch.manual_seed(100 * seed + rank)
        random.seed(100 * seed + rank)
        self.records: list[str] = []

    def train(self, until: int) -> None:
        while self.updater.clock.update < until:
            for window in self.updater.windows(self.loader, size=3, count=self.count):
                record = self.updater.update(window, loss)
                self.records.append(repr((record.verdict, record.loss_mean, record.grad_norm)))
                if self.updater.clock.update == until:
                    break


def interrupted(rank: int, size: int, kind: str, streamed: bool, folder: str) -> Any:
    del rank, size
    whole = Noisy(kind, seed=1, streamed=streamed)
    whole.train(8)
    wanted = everything(whole.updater)
    first = Noisy(kind, seed=1, streamed=streamed)
    first.train(3)
    ms.save(Path(folder) / NAME, first.updater, extra={"rank": dist.get_rank()})
    second = Noisy(kind, seed=2, streamed=streamed)
    extra = ms.load(Path(folder) / NAME, second.updater)
    second.train(8)
    return {
        "state": everything(second.updater) == wanted,
        "records": first.records + second.records == whole.records,
        "verdicts": whole.records,
        "extra": extra,
        "buffer": bits(whole.updater.model.state_dict().get("1.running_mean")),
    }


@pytest.mark.parametrize(
    ("kind", "size", "streamed"),
    [("DDP", 2, False), ("FSDP2", 3, True), ("HSDP", 4, False)],
)
def test_on_as_many_ranks_it_is_the_uninterrupted_run_to_the_bit(
    kind: str, size: int, streamed: bool, tmp_path: Path
) -> None:
    found = run(interrupted, kind, streamed, str(tmp_path), size=size)
    for rank, result in enumerate(found):
        assert result["records"]
        assert result["state"]
        assert any("NONFINITE" in record for record in result["verdicts"])
        assert result["extra"] == {"rank": rank}
    if kind != "DDP":
        assert found[0]["buffer"] != found[1]["buffer"]


def test_torch_itself_reads_the_folder_and_it_names_no_machine(tmp_path: Path) -> None:
    job = Job("plain")
    job.train(1)
    ms.save(tmp_path / NAME, job.updater)
    ((step, after), _) = run(leg, "FSDP2", str(tmp_path), size=2)
    dcp_to_torch_save(tmp_path / NAME, tmp_path / "torch.pt")
    found = torch.load(tmp_path / "torch.pt", weights_only=True)
    names = [name for name, _ in job.updater.model.named_parameters()]
    assert worst([found[f"model/{name}"] for name in names], after) == 0.0
    assert f"optimizer/{names[0]}['exp_avg']" in found
    assert str(tmp_path).encode() not in (tmp_path / NAME / ".metadata").read_bytes()
    assert step == 2


class WithUnused(nn.Module):
    """One layer never gets a gradient, so the optimizer has no state for it."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def save_sparse(rank: int, size: int, folder: str) -> list[tuple[int, bool]]:
    found = []
    for num_steps in (0, 1):

        def made() -> ms.Updater:
            torch.manual_seed(0)
            model = WithUnused()
            mesh = init_device_mesh("cpu", (size,))
            for layer in (model.used, model.unused, model):
                fully_shard(layer, mesh=mesh)
            return ms.Updater(model, torch.optim.AdamW(model.parameters()))

        updater, other = made(), made()
        for _ in range(num_steps):
            x = torch.full((2, 3), 1.0 + rank)
            updater.update([x], lambda model, x: model(x).square().sum(), count=ms.rows())
        wanted = everything(updater)
        ms.save(Path(folder) / NAME, updater)
        ms.load(Path(folder) / NAME, other)
        found.append((len(other.optimizer.state), wanted == everything(updater)))
        assert everything(other) == wanted
    return found


def test_state_that_the_optimizer_does_not_have_yet_is_not_made_up(tmp_path: Path) -> None:
    for found in run(save_sparse, str(tmp_path), size=2):
        assert found == [(0, True), (2, True)]


# -- what is a rank's own ------------------------------------------------------------------------


class WithExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3)
        self.expert = nn.Linear(3, 3)
        self.register_buffer("order", torch.arange(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(self.shared(x))


def expert_updater(*, has_expert: bool) -> ms.Updater:
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model: nn.Module = WithExpert()
    ignored = []
    if has_expert:
        torch.manual_seed(1 + rank)
        model.expert = nn.Linear(3, 3)  # type: ignore[assignment]
        ignored = ["expert.weight", "expert.bias"]
    ignored.append("order")
    if dist.is_initialized():
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        model = DistributedDataParallel(model)
    return ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def save_own(rank: int, size: int, folder: str) -> list[bool]:
    del size
    found = []
    for name, has_expert in (("expert", True), ("buffer", False)):
        updater = expert_updater(has_expert=has_expert)
        inner: Any = updater.model.module
        # A permutation of each rank's own: every sum over it is the same.
        inner.order.copy_(torch.arange(8).roll(rank))
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
        updater.update([x], lambda model, batch: model(batch).square().sum(), count=ms.rows())
        wanted = everything(updater)
        ms.save(Path(folder) / name, updater)
        other = expert_updater(has_expert=has_expert)
        ms.load(Path(folder) / name, other)
        found.append(everything(other) == wanted)
    return found


def test_what_each_rank_has_of_its_own_returns_to_it_and_to_no_other_number(
    tmp_path: Path,
) -> None:
    assert run(save_own, str(tmp_path), size=2) == [[True, True], [True, True]]
    updater = expert_updater(has_expert=True)
    before = everything(updater)
    with pytest.raises(ms.CheckpointError, match=r"different numbers in `model/expert\.bias`"):
        ms.load(tmp_path / "expert", updater)
    assert everything(updater) == before
    updater = expert_updater(has_expert=False)
    streams = bits([torch.get_rng_state(), random.getstate()])
    ms.load(tmp_path / "buffer", updater)
    assert bits([torch.get_rng_state(), random.getstate()]) == streams
    assert updater.model.order.tolist() == list(range(8))  # the first rank's


def test_a_mark_sees_every_bit_and_every_place() -> None:
    from midstep.checkpoint.alike import Marker

    mark_of = Marker().mark
    words = torch.randn(3, 1001)  # no whole number of words, beyond one block of none
    seen = {mark_of(words)}
    for change in range(40):
        other = words.clone()
        other.view(torch.int32).flatten()[change * 75] ^= 1 << (change % 32)
        seen.add(mark_of(other))
    swapped = words.clone()
    swapped[0, [0, 2]] = swapped[0, [2, 0]]
    seen |= {mark_of(swapped), mark_of(words.T), mark_of(words.double()), mark_of(words[:, 1:])}
    negative = torch.randn(100, 100, dtype=torch.float64)
    seen |= {mark_of(negative), mark_of(-negative), mark_of(negative.flip(0))}
    large = torch.zeros(1 << 19, dtype=torch.bool)
    for place in (0, 7, 1 << 18, (1 << 19) - 1):
        large.zero_()[place] = True
        seen.add(mark_of(large))
    assert len(seen) == 52
    assert mark_of(words.clone()) == mark_of(words)
    assert mark_of(words.T.contiguous()) == mark_of(words.T)


# -- the place in the data -----------------------------------------------------------------------


class OwnPlace:
    """A loader that keeps its own place."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        x, y = rows()
        while self.position < NUM_ROWS:
            self.position += 2
            yield x[self.position - 2 : self.position], y[self.position - 2 : self.position]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position = state_dict["position"]


def save_places(rank: int, size: int, folder: str) -> None:
    x, y = rows()
    loaders: dict[str, tuple[Any, int]] = {
        "three each": ([(x[i : i + 2], y[i : i + 2]) for i in range(0, 8, 2)], 1),
        "uneven": ([(x[:2], y[:2])] * (4 - 2 * rank), 3),
        "own place": (OwnPlace(), 1),
        "between passes": ([(x[:2], y[:2])] * 3, 99),
    }
    for name, (loader, num_windows) in loaders.items():
        updater = Job("DDP").updater
        size = 3 if name == "three each" else 1
        for index, window in enumerate(updater.windows(loader, size=size)):
            updater.update(window, loss)
            if index + 1 == num_windows:
                break
        ms.save(Path(folder) / name, updater)


def load_places(rank: int, size: int, folder: str) -> dict[str, Any]:
    del rank, size
    found: dict[str, Any] = {}
    for name in ("three each", "uneven", "own place", "between passes"):
        job = Job("DDP", perturbed=True)
        before = everything(job.updater)
        try:
            ms.load(Path(folder) / name, job.updater)
        except ms.CheckpointError as error:
            assert everything(job.updater) == before
            found[name] = str(error)
        else:
            found[name] = (job.step, len(list(job.updater.windows(job.loader, size=job.size))))
    return found


def test_a_place_in_the_data_that_the_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    run(save_places, str(tmp_path), size=2)
    first, *others = run(load_places, str(tmp_path), size=4)
    assert all(other == first for other in others)
    assert (
        "They had used 6 batches together, which is no whole number for each" in first["three each"]
    )
    assert "The ranks had used [3, 2] batches" in first["uneven"]
    assert "A stateful loader kept the place" in first["own place"]
    assert first["between passes"] == (3, 3)
    for message in list(first.values())[:3]:
        assert "Nothing was changed. Resume on 2 ranks, or from a checkpoint" in message


class Strided:
    """Every `size`-th batch of one order that a generator decides, the same on all ranks."""

    def __init__(self, rank: int, size: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[Any]:
        x, y = rows()
        order = torch.randperm(NUM_ROWS // 2, generator=self.generator)
        for batch in order[self.rank :: self.size].tolist():
            yield x[2 * batch : 2 * batch + 2], y[2 * batch : 2 * batch + 2]


def read(rank: int, size: int, folder: str, seed: int, until: int, *, resumes: bool) -> list[float]:
    updater = Job("DDP" if size > 1 else "plain").updater
    if resumes:
        ms.load(Path(folder) / NAME, updater)
    seen = []
    for window in updater.windows(Strided(rank, size, seed), size=4 // size):

        def noting(model: Any, batch: Any) -> ms.LossSum:
            seen.append(batch[0][0, 0].item())
            return loss(model, batch)

        updater.update(window, noting)
        if updater.clock.step == until:
            break
    if not resumes:
        ms.save(Path(folder) / NAME, updater)
    return seen


def read_first(rank: int, size: int, folder: str) -> list[float]:
    return read(rank, size, folder, 5, 2, resumes=False)


def test_an_order_that_all_ranks_shared_is_read_on_by_another_number(tmp_path: Path) -> None:
    first = run(read_first, str(tmp_path), size=2)
    rest = read(0, 1, str(tmp_path), 99, 99, resumes=True)
    x, _ = rows()
    assert sorted([*first[0], *first[1], *rest]) == sorted(x[::2, 0].tolist())
    assert len(rest) == NUM_ROWS // 2 - 8
