import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
import copy

q = nn.Linear(6, 4)
k = copy.deepcopy(q).requires_grad_(False)
queue = F.normalize(torch.randn(16, 4), dim=1)
opt = torch.optim.SGD(q.parameters(), lr=0.05)
accum = 2
for i in range(8):
    x = torch.randn(4, 6)
    zq = F.normalize(q(x), dim=1)
    with torch.no_grad():
        zk = F.normalize(k(x + 0.1 * torch.randn_like(x)), dim=1)
    pos = (zq * zk).sum(1, keepdim=True)
    logits = torch.cat([pos, zq @ queue.T], 1) / 0.2
    loss = F.cross_entropy(logits, torch.zeros(4, dtype=torch.long)) / accum
    loss.backward()
    if (i + 1) % accum == 0:
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for a, b in zip(k.parameters(), q.parameters()):
                a.lerp_(b, 0.01)
            queue = torch.cat([zk, queue])[:16]
