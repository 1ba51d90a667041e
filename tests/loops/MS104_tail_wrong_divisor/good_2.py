import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

iter_size = 4
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y) / iter_size
    loss.backward()
    if (i + 1) % iter_size == 0 or i == len(loader) - 1:
        optimizer.step()
        optimizer.zero_grad()
