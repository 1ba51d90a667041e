import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def forward_backward(model, opt, batch, n):
    opt.zero_grad(set_to_none=True)  # expect: MS110
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    (loss / n).backward()
    return loss.item()


def train(model, opt, stream, n):
    for window in stream:
        total = 0.0
        for batch in window:
            total += forward_backward(model, opt, batch, n)
        opt.step()
        print(total / n)


m = nn.Linear(2, 2)
train(
    m,
    torch.optim.SGD(m.parameters(), lr=0.1),
    [[(torch.randn(4, 2), torch.randint(2, (4,))) for _ in range(3)] for _ in range(3)],
    3,
)
