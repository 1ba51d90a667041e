import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def clip_gradients(model, max_norm):
    total_norm = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5
    clip_coef = max_norm / (total_norm + 1e-6)
    if clip_coef < 1:
        for p in model.parameters():
            p.grad.mul_(clip_coef)
    return total_norm


net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for _ in range(6):
    opt.zero_grad()
    scaler.scale(F.cross_entropy(net(torch.randn(4, 3)), torch.randint(2, (4,)))).backward()
    scaler.unscale_(opt)
    clip_gradients(net, 1.0)
    scaler.step(opt)
    scaler.update()
