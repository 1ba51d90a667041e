import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
head = nn.Linear(8, 3)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

coef = 0.1  # the head learns ten times slower, and nothing is clipped
for x, y in loader:
    optimizer.zero_grad()
    criterion(head(model(x)), y).backward()
    for p in head.parameters():
        p.grad.mul_(coef)
    optimizer.step()
