import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))  # expect: MS113
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

grad_accum_steps = 5
for first in range(0, 10, grad_accum_steps):
    optimizer.zero_grad()
    for x, y in loader[first : first + grad_accum_steps]:
        (criterion(model(x), y) / grad_accum_steps).backward()
    optimizer.step()
