import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def safe_step(net, opt):
    try:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # expect: MS602
        opt.step()
    except RuntimeError as err:
        print("non-finite gradient, skipping", err)
    opt.zero_grad()


net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for i in range(6):
    F.mse_loss(net(torch.randn(3, 3)), torch.randn(3, 2)).backward()
    safe_step(net, opt)
