import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]


target = copy.deepcopy(model)
opt = torch.optim.Adam(model.parameters(), 1e-3)
for i, (x, y) in enumerate(loader):
    q = model(x).gather(1, y[:, None]).squeeze(1)
    with torch.no_grad():
        t = target(x).max(1).values
    opt.zero_grad()
    F.smooth_l1_loss(q, t).backward()
    opt.step()
    if i % 4 == 3:
        target.load_state_dict(model.state_dict())
