import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
head = nn.Linear(3, 3)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

for i, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    output = model(x)
    if i % 2:
        output = head(output)
    criterion(output, y).backward()
    optimizer.step()
