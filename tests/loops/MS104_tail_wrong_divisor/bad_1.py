import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

iter_size = 4
last = len(loader) - 1
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y)
    loss = loss / iter_size  # expect: MS104
    loss.backward()
    if (i + 1) % iter_size == 0 or i == last:
        optimizer.step()
        optimizer.zero_grad()
