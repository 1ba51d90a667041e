import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
head = nn.Linear(8, 3)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]


def clip(params, limit):
    total = 0.0
    for p in params:
        if p.grad is not None:
            total += p.grad.norm().item() ** 2
    clip_coef = limit / (total**0.5 + 1e-6)
    if clip_coef < 1:
        for p in params:
            p.grad.data.mul_(clip_coef)  # expect[lint]: MS206


for x, y in loader:
    loss = criterion(head(model(x)), y)
    optimizer.zero_grad()
    loss.backward()
    clip(list(head.parameters()), 0.01)
    optimizer.step()
