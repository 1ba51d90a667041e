import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

for x, y in [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(4)]:
    optimizer.zero_grad()
    for a, b in zip(x.chunk(4), y.chunk(4), strict=False):
        (F.cross_entropy(model(a), b) / 4).backward()
    optimizer.step()
