import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

total, number, num_nan = 0.0, 0, 0
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    value = loss.item()
    if value == value:
        total += value
        number += 1
    if value != value:
        num_nan += 1
print(total / number, num_nan)
