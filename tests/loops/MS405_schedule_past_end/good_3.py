import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def main():
    loader = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(10)]
    epochs, k = 5, 4
    model = nn.Linear(3, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    total = epochs * -(-len(loader) // k)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=total)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            n = min(k, len(loader) - i // k * k)
            (F.mse_loss(model(x), y) / n).backward()
            if (i + 1) % k == 0 or i + 1 == len(loader):
                opt.step()
                opt.zero_grad()
                sched.step()


main()
