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
    torch.manual_seed(0)
    first, optimizer_a = build()
    second, optimizer_b = build()
    for x, y in data():
        optimizer_a.zero_grad()
        F.cross_entropy(first(x), y).backward()
        optimizer_b.zero_grad()
        optimizer_a.step()
        F.cross_entropy(second(x), y).backward()
        optimizer_b.step()


main()
