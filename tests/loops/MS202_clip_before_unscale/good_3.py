import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
G, D = nn.Linear(2, 2), nn.Linear(2, 1)
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, fused=True)
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for _ in range(6):
    fake = G(torch.randn(4, 2))
    opt_d.zero_grad()
    d_loss = F.softplus(-D(torch.randn(4, 2))).mean() + F.softplus(D(fake.detach())).mean()
    scaler.scale(d_loss).backward()
    scaler.unscale_(opt_d)
    nn.utils.clip_grad_norm_(D.parameters(), 1.0)
    scaler.step(opt_d)
    opt_g.zero_grad()
    g_loss = F.softplus(-D(fake)).mean()
    scaler.scale(g_loss).backward()
    scaler.unscale_(opt_g)
    nn.utils.clip_grad_norm_(G.parameters(), 0.1)
    scaler.step(opt_g)
    scaler.update()
