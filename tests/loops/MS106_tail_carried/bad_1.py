import torch
import torch.nn as nn
import torch.nn.functional as F


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def data(batches=10):
    return [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(batches)]


def train_epoch(model, optimizer, batches, k):
    for i, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y) / k
        loss.backward()
        if (i + 1) % k != 0:  # expect: MS106
            continue
        optimizer.step()
        optimizer.zero_grad()


def main():
    model, optimizer = build()
    batches = data()
    for _ in range(2):
        train_epoch(model, optimizer, batches, 4)


main()
