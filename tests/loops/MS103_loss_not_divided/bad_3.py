import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
X, Y = torch.randn(64, 3), torch.randn(64, 1)
micro_bs = 4
num_micro = 4
bs = micro_bs * num_micro
for start in range(0, 64, bs):
    xb, yb = X[start : start + bs], Y[start : start + bs]
    opt.zero_grad()
    for xm, ym in zip(xb.split(micro_bs), yb.split(micro_bs)):
        loss = F.mse_loss(net(xm), ym)
        loss.backward()  # expect: MS103
    opt.step()
