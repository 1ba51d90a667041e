import math

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

norms = []
for x, y in loader:
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if not norms:
        norms = [torch.zeros_like(p) for p in model.parameters()]
    for second, p in zip(norms, model.parameters(), strict=True):
        second.mul_(0.9).add_(p.grad.pow(2), alpha=0.1)
    optimizer.step()
print(math.sqrt(float(norms[0].sum())))
