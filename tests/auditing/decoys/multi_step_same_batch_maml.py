import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

meta = torch.optim.SGD(model.parameters(), 0.01)
for x, y in loader[:5]:
    fast = [p.clone() for p in model.parameters()]
    out = torch.relu(x @ fast[0].T + fast[1]) @ fast[2].T + fast[3]
    g = torch.autograd.grad(F.cross_entropy(out, y), fast, create_graph=True)
    fast = [a - 0.1 * b for a, b in zip(fast, g, strict=False)]
    out = torch.relu(x @ fast[0].T + fast[1]) @ fast[2].T + fast[3]
    meta.zero_grad()
    F.cross_entropy(out, y).backward()
    meta.step()
