import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
head = nn.Linear(3, 3)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

for x, y in loader:
    optimizer.zero_grad()
    criterion(head(model(x)), y).backward()  # expect[audit]: MS701
    optimizer.step()
