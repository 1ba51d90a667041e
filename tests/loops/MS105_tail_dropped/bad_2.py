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
    for i, (x, y) in enumerate(data()):
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        if i % 4 == 3:  # expect: MS105
            optimizer.step()
            optimizer.zero_grad()


main()
