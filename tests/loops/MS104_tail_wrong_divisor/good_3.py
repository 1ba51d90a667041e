import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
model = nn.Linear(5, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
data = [(torch.randn(4, 5), torch.randint(2, (4,))) for _ in range(10)]
accum = 4
for epoch in range(2):
    pending = 0
    for x, y in data:
        loss = F.cross_entropy(model(x), y) / accum
        loss.backward()
        pending += 1
        if pending == accum:
            optimizer.step()
            optimizer.zero_grad()
            pending = 0
    if pending:
        for p in model.parameters():
            p.grad.mul_(accum / pending)
        optimizer.step()
        optimizer.zero_grad()
