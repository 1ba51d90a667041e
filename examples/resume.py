"""A run that is stopped and goes on: the same losses bit for bit, dropout included."""

import tempfile
from pathlib import Path

import torch

import midstep as ms

features, labels = torch.randn(60, 8), torch.randint(0, 3, (60,))
data = torch.utils.data.TensorDataset(features, labels)
path = Path(tempfile.mkdtemp()) / "checkpoint.pt"


def start():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(), torch.nn.Linear(32, 3))
    updater = ms.Updater(model, torch.optim.AdamW(model.parameters()), precision=ms.FP16())
    return updater, torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)


def loss(model, batch):
    return ms.cross_entropy(model(batch[0]), batch[1])


def train(updater, loader, stop_after=None):
    losses = []
    for window in updater.windows(loader, size=2, count=ms.targets()):
        losses.append(updater.update(window, loss).loss_mean)
        if updater.clock.step == stop_after:
            ms.save(path, updater)
            return losses
    return losses


straight = train(*start())
first = train(*start(), stop_after=2)
updater, loader = start()
ms.load(path, updater)
second = train(updater, loader)
print([f"{mean:.6f}" for mean in straight])
print([f"{mean:.6f}" for mean in first + second])
assert straight == first + second
