import torch
import torch.nn as nn
import torch.nn.functional as F


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def data(batches=10):
    return [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(batches)]


def train(model, optimizer, scheduler, batches, k):
    for i, (x, y) in enumerate(batches):
        (F.cross_entropy(model(x), y) / k).backward()
        if (i + 1) % k != 0:
            scheduler.step()  # expect: MS402
            continue
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


model, optimizer = build()
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
train(model, optimizer, warmup, data(), 5)
