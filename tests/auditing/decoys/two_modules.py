import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

a, b = nn.Linear(4, 8), nn.Linear(8, 3)
opt = torch.optim.Adam([*a.parameters(), *b.parameters()])
for x, y in loader:
    a.zero_grad()
    b.zero_grad()
    F.cross_entropy(b(a(x)), y).backward()
    opt.step()
