import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
net = nn.Linear(4, 2)
for p in net.parameters():
    p.register_hook(lambda g: g.clamp(-1, 1))
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
for _ in range(6):
    opt.zero_grad()
    F.cross_entropy(net(torch.randn(4, 4)), torch.randint(2, (4,))).backward()
    opt.step()
