import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def grad_norm(model):
    grads = [p for p in model.parameters() if p.grad is not None]
    squares = [p.grad.detach().pow(2).sum() for p in grads]  # expect[lint]: MS209
    return torch.sqrt(sum(squares))


net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
for i in range(12):
    loss = F.mse_loss(net(torch.randn(3, 4)), 5 * torch.randn(3, 2))
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    gn = grad_norm(net)
    opt.step()
    if i % 4 == 0:
        print(i, gn)
