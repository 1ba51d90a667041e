"""What the tests of resuming share: a small run that can be made twice, and kinds of loaders."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

import midstep as ms

NUM_ROWS = 22
BATCH = 3


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global stream is the one to be restored


def rows_of_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(NUM_ROWS, 4, generator=generator)
    return x, torch.randint(3, (NUM_ROWS,), generator=generator)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Rows with noise from python's, numpy's and torch's global streams."""

    def __init__(self) -> None:
        self.x, self.y = rows_of_data()

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = random.gauss(0, 0.1) + float(np.random.randn()) * 0.1  # noqa: NPY002
        return self.x[index] + noise + 0.1 * torch.randn(4), self.y[index]


class Noisy(Augmented):
    """Rows with noise from python's and numpy's global streams, which no model draws from."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = random.gauss(0, 0.1) + float(np.random.randn()) * 0.1  # noqa: NPY002
        return self.x[index] + noise, self.y[index]


class Rows(IterableDataset[tuple[Tensor, Tensor]]):
    """Rows one after the other, in an order that python's global stream decides."""

    def __init__(self) -> None:
        self.x, self.y = rows_of_data()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = list(range(NUM_ROWS))
        random.shuffle(order)
        for index in order:
            yield self.x[index], self.y[index]


class Stateful:
    """A loader that keeps its own place and its own random stream, as torchdata's do."""

    def __init__(self) -> None:
        self.x, self.y = rows_of_data()
        self.stream = random.Random(5)
        self.order: list[int] | None = None
        self.position = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.order is None:
            self.order = list(range(NUM_ROWS))
            self.stream.shuffle(self.order)
            self.position = 0
        while self.position < NUM_ROWS:
            picked = self.order[self.position : self.position + BATCH]
            self.position += BATCH
            yield self.x[picked], self.y[picked]
        self.order = None

    def state_dict(self) -> dict[str, Any]:
        version, internal, gauss = self.stream.getstate()
        return {
            "stream": (version, internal, gauss),
            "order": None if self.order is None else list(self.order),
            "position": self.position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, internal, gauss = state["stream"]
        self.stream.setstate((version, tuple(internal), gauss))
        self.order = None if state["order"] is None else list(state["order"])
        self.position = state["position"]


def plain_batches() -> list[tuple[Tensor, Tensor]]:
    x, y = rows_of_data()
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def with_sampler_generator() -> DataLoader[Any]:
    data = TensorDataset(*rows_of_data())
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(3))
    return DataLoader(data, batch_size=BATCH, sampler=sampler)


def with_batch_sampler() -> DataLoader[Any]:
    data = TensorDataset(*rows_of_data())
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(3))
    return DataLoader(data, batch_sampler=BatchSampler(sampler, BATCH, drop_last=False))


LOADERS: dict[str, Callable[[], Any]] = {
    "list": plain_batches,
    "shuffled": lambda: DataLoader(TensorDataset(*rows_of_data()), batch_size=BATCH, shuffle=True),
    "shuffled with a generator": lambda: DataLoader(
        TensorDataset(*rows_of_data()),
        batch_size=BATCH,
        shuffle=True,
        generator=torch.Generator().manual_seed(11),
    ),
    "sampler with a generator": with_sampler_generator,
    "batch sampler with a generator": with_batch_sampler,
    "augmented": lambda: DataLoader(Augmented(), batch_size=BATCH, shuffle=True),
    "noisy": lambda: DataLoader(Noisy(), batch_size=BATCH, shuffle=True),
    "iterable": lambda: DataLoader(Rows(), batch_size=BATCH),
    "stateful": Stateful,
}

WAYS: dict[str, dict[str, Any]] = {
    "size, streamed": {"size": 3},
    "size, counted": {"size": 3, "count": ms.targets()},
    "rows": {"rows": 2, "count": ms.rows()},
    "targets": {"targets": 7, "count": ms.targets()},
}


@dataclasses.dataclass
class Run:
    """One run: everything that a script makes before its loop."""

    updater: ms.Updater
    loader: Any
    windows: dict[str, Any]
    records: list[ms.UpdateRecord] = dataclasses.field(default_factory=list)

    @classmethod
    def made(
        cls,
        loader: str = "shuffled",
        way: str = "size, counted",
        *,
        seed: int = 0,
        precision: Any = None,
        optimizer: str = "AdamW",
    ) -> "Run":
        seed_all(seed)
        model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3)
        )
        stepper = getattr(torch.optim, optimizer)(model.parameters(), lr=0.02)
        updater = ms.Updater(
            model,
            stepper,
            clip=ms.ByGlobalNorm(0.5),
            precision=precision,
            schedule=torch.optim.lr_scheduler.CosineAnnealingLR(stepper, 12),
            averaged_model=AveragedModel(model),
        )
        return cls(updater, LOADERS[loader](), WAYS[way])

    def windows_left(self, epochs: int) -> Iterator[ms.UpdateRecord]:
        """Go on with the epochs that are left, an update at a time."""
        while self.updater.clock.epoch < epochs:
            for window in self.updater.windows(self.loader, **self.windows):
                self.records.append(self.updater.update(window, self.loss))
                yield self.records[-1]

    @staticmethod
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ms.LossSum:
        x, y = batch
        if len(x) == 1:  # one row has no variance to normalize by
            x, y = x.repeat(2, 1), y.repeat(2)
            return ms.LossSum(F.cross_entropy(model(x).float(), y, reduction="sum") / 2, 1)
        return ms.cross_entropy(model(x), y)

    def outcome(self) -> tuple[Any, ...]:
        """All that must not differ by a bit; `seconds` may."""
        average: Any = self.updater.averaged_model
        return (
            [dataclasses.replace(record, seconds=0.0) for record in self.records],
            bits(self.updater.model.state_dict()),
            bits(average.state_dict()),
            bits(self.updater.optimizer.state_dict()["state"]),
            self.updater.loss_scale.state_dict(),
            dataclasses.asdict(self.updater.clock),
            bits(torch.get_rng_state()),
            random.random(),
            float(np.random.rand()),  # noqa: NPY002
        )

    def save(self, path: Path) -> None:
        ms.save(path, self.updater)


def bits(value: object) -> object:
    """Anything, in a form whose equality is that of every bit."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value
