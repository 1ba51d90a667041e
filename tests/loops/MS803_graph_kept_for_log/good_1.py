import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

for first in range(0, 10, 5):
    optimizer.zero_grad()
    total = 0
    for x, y in loader[first : first + 5]:
        total += criterion(model(x), y)
    (total / 5).backward()
    optimizer.step()
