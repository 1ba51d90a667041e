import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def define(i, o):
    return nn.Sequential(nn.Linear(i, 8), nn.ReLU(), nn.Linear(8, o))


class Pix2Pix:
    def __init__(self):
        self.netG, self.netD = define(4, 4), define(8, 1)
        self.optimizer_G = torch.optim.Adam(
            self.netG.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True
        )
        self.optimizer_D = torch.optim.Adam(
            self.netD.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True
        )
        self.optimizers = [self.optimizer_G, self.optimizer_D]
        self.schedulers = [
            torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1.0 - max(0, e - 1) / 3)
            for o in self.optimizers
        ]

    def set_input(self, a, b):
        self.real_A, self.real_B = a, b

    def forward(self):
        self.fake_B = self.netG(self.real_A)

    def set_requires_grad(self, net, flag):
        for p in net.parameters():
            p.requires_grad = flag

    def backward_D(self):
        fake = self.netD(torch.cat((self.real_A, self.fake_B), 1).detach())
        real = self.netD(torch.cat((self.real_A, self.real_B), 1))
        self.loss_D = (F.softplus(fake).mean() + F.softplus(-real).mean()) * 0.5
        self.loss_D.backward()

    def backward_G(self):
        fake = self.netD(torch.cat((self.real_A, self.fake_B), 1))
        self.loss_G = F.softplus(-fake).mean() + 10 * F.l1_loss(self.fake_B, self.real_B)
        self.loss_G.backward()

    def optimize_parameters(self):
        self.forward()
        self.set_requires_grad(self.netD, True)
        self.optimizer_D.zero_grad()
        self.backward_D()
        self.optimizer_D.step()
        self.set_requires_grad(self.netD, False)
        self.optimizer_G.zero_grad()
        self.backward_G()
        self.optimizer_G.step()

    def update_learning_rate(self):
        for s in self.schedulers:
            s.step()


m = Pix2Pix()
for epoch in range(3):
    for _ in range(3):
        m.set_input(torch.randn(4, 4), torch.randn(4, 4))
        m.optimize_parameters()
    m.update_learning_rate()
