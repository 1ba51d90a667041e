import torch
import torch.nn as nn
import torch.nn.functional as F


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def data(batches=10):
    return [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(batches)]


from torch.nn.utils import clip_grad_norm_


def main(k=5):
    model, optimizer = build()
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x), y) / k).backward()
        norm = clip_grad_norm_(model.parameters(), float("inf"))
        if (i + 1) % k == 0:
            clip_grad_norm_(model.parameters(), max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
    return norm


main()
