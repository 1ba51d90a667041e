import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class PINN:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))
        self.adam = torch.optim.Adam(self.net.parameters(), lr=1e-2, fused=True)
        self.lbfgs = torch.optim.LBFGS(self.net.parameters(), max_iter=10, history_size=5)
        self.x = torch.linspace(0, 1, 20).view(-1, 1)

    def residual(self):
        x = self.x.clone().requires_grad_(True)
        u = self.net(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (du + u).pow(2).mean() + (self.net(torch.zeros(1, 1)) - 1).pow(2).mean()

    def closure(self):
        self.lbfgs.zero_grad()
        loss = self.residual()
        loss.backward()
        return loss

    def fit(self):
        for _ in range(20):
            self.adam.zero_grad()
            loss = self.residual()
            loss.backward()
            self.adam.step()
        for _ in range(3):
            self.lbfgs.step(self.closure)


PINN().fit()
