import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

m = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
m[1].eval()
for p in m[1].parameters():
    p.requires_grad_(False)
opt = torch.optim.SGD(m.parameters(), lr=0.1)
for i, (x, y) in enumerate(loader):
    (F.cross_entropy(m(x), y) / 3).backward()
    if (i + 1) % 3 == 0:
        opt.step()
        opt.zero_grad()
