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
    grad_accum_steps = 5
    batches = data()
    for first in range(0, len(batches), grad_accum_steps):
        window = batches[first : first + grad_accum_steps]
        num_rows = sum(len(y) for _, y in window)
        for x, y in window:
            loss = F.cross_entropy(model(x), y, reduction="sum") / num_rows
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
