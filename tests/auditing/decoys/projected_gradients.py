import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
body, h1, h2 = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)
params = [*body.parameters(), *h1.parameters(), *h2.parameters()]
opt = torch.optim.SGD(params, lr=0.01)
for _ in range(5):
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    grads = []
    for head, col in ((h1, 0), (h2, 1)):
        opt.zero_grad()
        loss = F.mse_loss(head(body(x).relu())[:, 0], y[:, col])
        loss.backward()
        grads.append([None if p.grad is None else p.grad.clone() for p in params])
    opt.zero_grad()
    flat = [torch.cat([g.flatten() for g in gs[:2]]) for gs in grads]
    dot = flat[0] @ flat[1]
    for i, p in enumerate(params):
        a, b = grads[0][i], grads[1][i]
        if a is None:
            p.grad = b
        elif b is None:
            p.grad = a
        else:
            p.grad = a + b - (dot / flat[1].norm() ** 2 * b if dot < 0 else 0)
    opt.step()
