import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(9):
    opt.zero_grad()
    F.cross_entropy(net(torch.randn(4, 3)), torch.randint(2, (4,))).backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in net.parameters()))
    scale = (0.1 / norm).clamp(max=1.0)
    for p in net.parameters():
        p.grad.data.mul_(0.1 / norm if norm > 0.1 else 1.0)
    opt.step()
