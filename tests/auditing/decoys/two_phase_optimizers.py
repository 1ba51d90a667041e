import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

o1 = torch.optim.Adam(model.parameters(), 1e-3)
for x, y in loader[:6]:
    o1.zero_grad()
    F.cross_entropy(model(x), y).backward()
    o1.step()
o2 = torch.optim.SGD(model.parameters(), 1e-3)
for x, y in loader[6:]:
    o2.zero_grad()
    F.cross_entropy(model(x), y).backward()
    o2.step()
