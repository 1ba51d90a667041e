import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
k, max_norm = 3, 0.1
for i in range(9):
    (F.cross_entropy(net(torch.randn(4, 3)), torch.randint(2, (4,))) / k).backward()
    total_norm = torch.norm(torch.stack([p.grad.norm() for p in net.parameters()]))
    for p in net.parameters():
        p.grad *= min(1.0, max_norm / float(total_norm))  # expect[lint]: MS201
    if (i + 1) % k == 0:
        opt.step()
        opt.zero_grad()
