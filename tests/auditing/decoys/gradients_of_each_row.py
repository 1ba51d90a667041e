import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
C, sigma = 1.0, 0.5
for _ in range(4):
    x, y = torch.randn(6, 4), torch.randint(2, (6,))
    acc = [torch.zeros_like(p) for p in net.parameters()]
    for i in range(len(x)):
        opt.zero_grad()
        F.cross_entropy(net(x[i : i + 1]), y[i : i + 1]).backward()
        nn.utils.clip_grad_norm_(net.parameters(), C)
        for a, p in zip(acc, net.parameters()):
            a.add_(p.grad)
    opt.zero_grad()
    for a, p in zip(acc, net.parameters()):
        p.grad = (a + sigma * C * torch.randn_like(a)) / len(x)
    opt.step()
