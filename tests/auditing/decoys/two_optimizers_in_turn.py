import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
m, a = nn.Linear(4, 3), nn.Linear(4, 3)
om, oa = torch.optim.SGD(m.parameters(), lr=0.1), torch.optim.Adam(a.parameters(), lr=1e-3)
for step in range(8):
    train_arch = step % 4 == 3
    x, y = torch.randn(4, 4), torch.randint(3, (4,))
    loss = F.cross_entropy(m(x) * a(x).sigmoid(), y)
    om.zero_grad()
    oa.zero_grad()
    loss.backward()
    if train_arch:
        oa.step()
    else:
        om.step()
