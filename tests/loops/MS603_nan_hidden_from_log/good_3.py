import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

log = []
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    value = loss.item()
    if value != value:
        raise RuntimeError("the loss is no number")
    loss.backward()
    optimizer.step()
    if value == value:
        log.append(value)
