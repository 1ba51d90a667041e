import torch
import torch.nn as nn
import torch.nn.functional as F


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def data(batches=10):
    return [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(batches)]


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


model, optimizer = build()
mean = sum(step(model, optimizer, x, y) for x, y in data()).item() / 10
