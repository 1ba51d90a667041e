import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

k = 4
for s in range(0, 12, k):
    w = loader[s : s + k]
    for _, y in w:
        y[0] = -100 if torch.rand(()) < 0.5 else y[0]
    n = sum((y >= 0).sum() for _, y in w)
    for x, y in w:
        (F.cross_entropy(model(x), y, ignore_index=-100, reduction="sum") / n).backward()
    optimizer.step()
    optimizer.zero_grad()
