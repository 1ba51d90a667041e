import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

warm = torch.optim.Adam(model.parameters(), lr=0.01)
for i, (x, y) in enumerate(loader):
    current = warm if i < 3 else optimizer
    current.zero_grad()
    criterion(model(x), y).backward()
    current.step()
