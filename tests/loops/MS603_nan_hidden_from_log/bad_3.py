import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
losses = []
for i in range(6):
    x = torch.randn(3, 3)
    if i == 3:
        x[0, 0] = float("inf")
    loss = F.mse_loss(net(x), torch.randn(3, 2))
    opt.zero_grad()
    loss.backward()
    opt.step()  # expect[audit]: MS601
    losses.append(torch.nan_to_num(loss.detach()))  # expect: MS603
