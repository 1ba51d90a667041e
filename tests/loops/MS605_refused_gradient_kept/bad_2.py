import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def data(batches=10):
    return [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(batches)]


def main(k=5):
    model, optimizer = build()
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x), y) / k).backward()
        if (i + 1) % k == 0:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if math.isfinite(norm):
                optimizer.step()
                optimizer.zero_grad()  # expect[lint]: MS605


main()
