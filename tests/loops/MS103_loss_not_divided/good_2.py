import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

k = 5
for i, (x, y) in enumerate(loader, 1):
    criterion(model(x), y).backward()
    if not i % k:
        for p in model.parameters():
            p.grad /= k
        optimizer.step()
        optimizer.zero_grad()
