import torch
import torch.nn as nn
import torch.nn.functional as F


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def data(batches=10):
    return [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(batches)]


def safe_step(model, optimizer):
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError:
        optimizer.zero_grad()
        return False
    optimizer.step()
    optimizer.zero_grad()
    return True


model, optimizer = build()
for x, y in data():
    F.cross_entropy(model(x), y).backward()
    safe_step(model, optimizer)
