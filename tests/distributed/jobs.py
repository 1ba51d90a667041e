"""A run that several ranks share in turns, the loop of one process that it must equal, and bits."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from distributed.models import WRAPPINGS, plain_model, weights
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import midstep as ms

NUM_ROWS = 48
BATCH = 2
ROWS_A_WINDOW = 16  # of all ranks together
NAME = "checkpoint.pt"


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(NUM_ROWS, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (NUM_ROWS,), generator=generator)


def oracle(num_steps: int) -> list[list[Tensor]]:
    """Weights after each step of one process, each window one batch, in a shuffled order."""
    x, y = rows()
    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    found = []
    for step in range(num_steps):
        epoch, window = divmod(step * ROWS_A_WINDOW, NUM_ROWS)
        order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(epoch))
        now = order[window : window + ROWS_A_WINDOW]
        optimizer.zero_grad()
        F.cross_entropy(model(x[now]), y[now]).backward()
        optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    return found


def loss(model: Any, batch: Any) -> ms.LossSum:
    return ms.cross_entropy(model(batch[0]), batch[1])


class Job:
    """A run on however many ranks: the same rows a window, taken in turns in one order."""

    def __init__(self, kind: str, *, perturbed: bool = False, **stages: Any) -> None:
        model: nn.Module = plain_model()
        rank, size = 0, 1
        if kind != "plain":
            wrapped = WRAPPINGS[kind](model)
            model, rank, size = wrapped.model, wrapped.data_rank, wrapped.data_size
        if perturbed:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        self.updater = ms.Updater(model, optimizer, **stages)
        self.sampler = DistributedSampler(TensorDataset(*rows()), num_replicas=size, rank=rank)
        self.loader = DataLoader(self.sampler.dataset, batch_size=BATCH, sampler=self.sampler)
        self.size = ROWS_A_WINDOW // (BATCH * size)

    @property
    def step(self) -> int:
        return self.updater.clock.step

    def train(self, until: int) -> None:
        while self.step < until:
            self.sampler.set_epoch(self.updater.clock.epoch)
            for window in self.updater.windows(self.loader, size=self.size, count=ms.targets()):
                self.updater.update(window, loss)
                if self.step == until:
                    break

    def weights(self) -> list[Tensor]:
        return weights(self.updater.model)


def bits(value: Any) -> Any:
    """Everything in a state, to the bit; of a split tensor the part that lies here."""
    if isinstance(value, Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        octets = local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return (str(value.dtype), tuple(value.shape), octets)
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return repr(value)


def everything(updater: ms.Updater) -> Any:
    """All that a load may change."""
    state = {key: part for key, part in updater.state_dict().items() if key != "cursor"}
    average: Any = updater.averaged_model
    found = [updater.model.state_dict(), updater.optimizer.state_dict(), state]
    found += [torch.get_rng_state(), random.getstate(), average and average.state_dict()]
    return bits(found)
