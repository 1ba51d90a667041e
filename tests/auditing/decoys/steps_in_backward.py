import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
opts = {p: torch.optim.SGD([p], lr=1e-2) for p in net.parameters()}


def hook(p):
    opts[p].step()
    opts[p].zero_grad()


for p in net.parameters():
    p.register_post_accumulate_grad_hook(hook)
for _ in range(6):
    F.cross_entropy(net(torch.randn(4, 4)), torch.randint(2, (4,))).backward()
