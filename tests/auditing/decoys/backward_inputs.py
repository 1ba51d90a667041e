import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
enc, dec, disc = nn.Linear(4, 3), nn.Linear(3, 4), nn.Linear(3, 1)
oae = torch.optim.SGD([*enc.parameters(), *dec.parameters()], lr=0.01)
od = torch.optim.SGD(disc.parameters(), lr=0.01)
for _ in range(6):
    x = torch.randn(8, 4)
    z = enc(x)
    oae.zero_grad()
    od.zero_grad()
    F.mse_loss(dec(z), x).backward(retain_graph=True, inputs=[*enc.parameters(), *dec.parameters()])
    F.softplus(disc(z.detach())).mean().backward(inputs=list(disc.parameters()))
    oae.step()
    od.step()
