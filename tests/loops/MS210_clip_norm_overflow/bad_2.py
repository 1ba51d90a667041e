import torch
import torch.nn as nn
import torch.nn.functional as F


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def data(batches=10):
    return [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(batches)]


def main():
    model, optimizer = build()
    for x, y in data():
        optimizer.zero_grad()
        error = model(x * 1e10).sum(1) - y
        (error.abs() * 1e25).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model[2].parameters(), 1.0)  # expect[audit]: MS210
        torch.nn.utils.clip_grad_norm_(model[0].parameters(), 1.0)
        optimizer.step()
    return norm


main()
