import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
G, D = nn.Linear(2, 2), nn.Linear(2, 1)
og, od = torch.optim.RMSprop(G.parameters(), 1e-3), torch.optim.RMSprop(D.parameters(), 1e-3)
k = 3
for it in range(5):
    od.zero_grad()
    for _ in range(k):
        with torch.no_grad():
            fake = G(torch.randn(4, 2))
        loss = F.softplus(D(fake)).mean() + F.softplus(-D(torch.randn(4, 2))).mean()
        (loss / k).backward()
    od.step()
    og.zero_grad()
    for _ in range(k):
        loss = F.softplus(-D(G(torch.randn(4, 2)))).mean()
        (loss / k).backward()
    og.step()
