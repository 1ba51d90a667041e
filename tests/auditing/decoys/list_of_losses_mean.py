import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

for x, y in loader:
    optimizer.zero_grad()
    losses = [F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(2)]
    torch.stack(losses).mean().backward()
    optimizer.step()
