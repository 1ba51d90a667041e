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
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))  # expect: MS703
    for x, y in data():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


main()
