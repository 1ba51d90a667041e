import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
ACCUM = 3
model = nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(9)]
count = 0
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss /= ACCUM  # expect[audit]: MS102
    loss.backward()
    count += 1
    if count == ACCUM:
        for p in model.parameters():
            p.grad /= ACCUM  # expect[lint]: MS102
        opt.step()
        opt.zero_grad()
        count = 0
