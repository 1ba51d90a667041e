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
    params = [*model.parameters(), *head.parameters()]
    norm = sum(p.grad.pow(2).sum() for p in params).sqrt()
    if norm > 0.01:
        for p in params:
            p.grad.mul_(0.01 / norm)
    optimizer.step()
