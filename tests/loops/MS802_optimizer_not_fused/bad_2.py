import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

from torch.optim import SGD

opt = SGD(model.parameters(), lr=0.1, momentum=0.9)  # expect: MS802
for x, y in loader:
    opt.zero_grad()
    criterion(model(x), y).backward()
    opt.step()
