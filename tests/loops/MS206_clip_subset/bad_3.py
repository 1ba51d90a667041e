import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
head = nn.Linear(8, 3)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

for x, y in loader:
    optimizer.zero_grad()
    criterion(head(model(x)), y).backward()
    norm = sum(p.grad.pow(2).sum() for p in head.parameters()).sqrt()
    if norm > 0.01:
        for p in head.parameters():
            p.grad.mul_(0.01 / norm)  # expect[lint]: MS206
    optimizer.step()
