import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

grad_accum_steps = 5
for first in range(0, len(loader), grad_accum_steps):
    optimizer.zero_grad()
    for x, y in loader[first : first + grad_accum_steps]:
        loss = criterion(model(x), y) / grad_accum_steps
        loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
