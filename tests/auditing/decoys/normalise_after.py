import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

k, n = 4, 0
for i, (x, y) in enumerate(loader):
    y[: i % 2] = -100
    F.cross_entropy(model(x), y, reduction="sum").backward()
    n += int((y >= 0).sum())
    if (i + 1) % k == 0:
        for p in model.parameters():
            p.grad.div_(n)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        n = 0
