import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        es = [p.grad * 0.05 / (norm + 1e-12) for p in model.parameters()]
        for p, e in zip(model.parameters(), es, strict=False):
            p.add_(e)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p, e in zip(model.parameters(), es, strict=False):
            p.sub_(e)
    optimizer.step()
    optimizer.zero_grad()
