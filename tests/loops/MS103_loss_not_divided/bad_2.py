import torch
import torch.nn as nn
import torch.nn.functional as F


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def data(batches=10):
    return [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(batches)]


def train(model, optimizer, batches, grad_accum_steps):
    stream = iter(batches)
    for _ in range(len(batches) // grad_accum_steps):
        optimizer.zero_grad()
        for _ in range(grad_accum_steps):
            x, y = next(stream)
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # expect: MS103
        optimizer.step()


model, optimizer = build()
train(model, optimizer, data(), 5)
