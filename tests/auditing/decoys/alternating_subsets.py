import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

a, b = nn.Linear(4, 3), nn.Linear(4, 3)
opt = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
for i, (x, y) in enumerate(loader):
    opt.zero_grad()
    F.cross_entropy((a if i % 2 else b)(x), y).backward()
    opt.step()
