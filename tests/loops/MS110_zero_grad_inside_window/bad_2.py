import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

accumulation_steps = 5
for first in range(0, len(loader), accumulation_steps):
    for x, y in loader[first : first + accumulation_steps]:
        optimizer.zero_grad()  # expect: MS110
        loss = criterion(model(x), y) / accumulation_steps
        loss.backward()
    optimizer.step()
