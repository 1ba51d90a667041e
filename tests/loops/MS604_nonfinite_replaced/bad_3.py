import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def clean(params):
    for p in params:
        bad = ~torch.isfinite(p.grad)  # expect[audit]: MS604
        p.grad[bad] = 0.0  # expect[lint]: MS604


def main():
    model = nn.Linear(3, 1)
    opt = torch.optim.Adam(model.parameters(), lr=0.05, fused=True)
    for i in range(6):
        x = torch.randn(4, 3)
        if i == 4:
            x[0] = float("inf")
        loss = model(x).square().mean()
        opt.zero_grad()
        loss.backward()
        clean(model.parameters())
        opt.step()


main()
