import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
a, b = nn.Linear(6, 4), nn.Linear(6, 4)
opt = torch.optim.AdamW([*a.parameters(), *b.parameters()], lr=1e-3, fused=True)
for _ in range(4):
    x, y = torch.randn(12, 6), torch.randn(12, 6)
    with torch.no_grad():
        ea = torch.cat([a(c) for c in x.split(4)])
        eb = torch.cat([b(c) for c in y.split(4)])
    ea, eb = ea.requires_grad_(), eb.requires_grad_()
    loss = F.cross_entropy(ea @ eb.T, torch.arange(12))
    loss.backward()
    opt.zero_grad()
    for ca, cb, ga, gb in zip(x.split(4), y.split(4), ea.grad.split(4), eb.grad.split(4)):
        ((a(ca) * ga).sum() + (b(cb) * gb).sum()).backward()
    opt.step()
