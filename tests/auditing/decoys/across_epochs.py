import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

k, seen = 5, 0
for _epoch in range(5):
    for x, y in loader:
        (F.cross_entropy(model(x), y) / k).backward()
        seen += 1
        if seen % k == 0:
            optimizer.step()
            optimizer.zero_grad()
