import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class Solver:
    def __init__(self):
        self.G, self.D = nn.Linear(4, 4), nn.Linear(4, 1)
        self.g_optimizer = torch.optim.Adam(self.G.parameters(), 1e-4, fused=True)
        self.d_optimizer = torch.optim.Adam(self.D.parameters(), 1e-4, fused=True)
        self.n_critic = 2

    def reset_grad(self):
        self.g_optimizer.zero_grad()
        self.d_optimizer.zero_grad()

    def gradient_penalty(self, y, x):
        (dydx,) = torch.autograd.grad(
            y, x, torch.ones_like(y), retain_graph=True, create_graph=True
        )
        return ((dydx.norm(2, dim=1) - 1) ** 2).mean()

    def train(self):
        for i in range(8):
            x = torch.randn(4, 4)
            fake = self.G(x)
            a = torch.rand(4, 1)
            mix = (a * x + (1 - a) * fake.detach()).requires_grad_(True)
            d_loss = (
                -self.D(x).mean()
                + self.D(fake.detach()).mean()
                + 10 * self.gradient_penalty(self.D(mix), mix)
            )
            self.reset_grad()
            d_loss.backward()
            self.d_optimizer.step()
            if (i + 1) % self.n_critic == 0:
                g_loss = -self.D(self.G(x)).mean() + F.l1_loss(self.G(x), x)
                self.reset_grad()
                g_loss.backward()
                self.g_optimizer.step()


Solver().train()
