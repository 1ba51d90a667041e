import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

base = nn.Linear(4, 3)
base.requires_grad_(False)
A, B = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.zeros(2, 3))
opt = torch.optim.AdamW([A, B], lr=1e-2)
for x, y in loader:
    F.cross_entropy(base(x) + x @ A @ B, y).backward()
    opt.step()
    opt.zero_grad()
