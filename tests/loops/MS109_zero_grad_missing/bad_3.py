import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
G, D = nn.Linear(2, 2), nn.Linear(2, 1)
og, od = (
    torch.optim.Adam(G.parameters(), 1e-3, fused=True),
    torch.optim.Adam(D.parameters(), 1e-3, fused=True),
)
for _ in range(8):
    real = torch.randn(4, 2)
    fake = G(torch.randn(4, 2))
    od.zero_grad()
    loss_d = F.softplus(-D(real)).mean() + F.softplus(D(fake.detach())).mean()
    loss_d.backward()
    od.step()
    loss_g = F.softplus(-D(fake)).mean()
    loss_g.backward()
    og.step()  # expect: MS109
