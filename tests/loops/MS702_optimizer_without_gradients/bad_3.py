# stops with: AssertionError
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def main():
    a, b = nn.Linear(3, 4), nn.Linear(3, 4)
    oa, ob = torch.optim.SGD(a.parameters(), lr=0.1), torch.optim.SGD(b.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for i in range(6):
        oa.zero_grad()
        ob.zero_grad()
        x = torch.randn(2, 3)
        loss = a(x).square().mean()
        if i % 2 == 0:
            loss = loss + b(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(oa)
        scaler.step(ob)  # expect[audit]: MS702
        scaler.update()


main()
