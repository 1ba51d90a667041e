import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class Tr:
    def __init__(self):
        self.net = nn.Linear(3, 2)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=1e-3)

    def train(self):
        for i in range(8):
            x = torch.randn(3, 3)
            if i == 2:
                x[0, 0] = float("inf")
            loss = F.mse_loss(self.net(x), torch.randn(3, 2))
            loss.backward()
            total = nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            if torch.isnan(total) or torch.isinf(total):
                print("skip")
                self.opt.zero_grad()
                continue
            self.opt.step()
            self.opt.zero_grad()


Tr().train()
