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
    history, running = [], 0.0
    for x, y in data():
        optimizer.zero_grad()
        losses = []
        for rows, targets in zip(x.chunk(2), y.chunk(2)):
            losses.append(F.cross_entropy(model(rows), targets))
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        history.append(loss.detach())
        running += loss.item()
    return history, running


main()
