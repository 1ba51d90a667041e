import torch
from torch import nn

torch.manual_seed(0)


class Lars(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                trust = p.norm() / (p.grad.norm() + 1e-6)
                p.sub_(group["lr"] * trust * p.grad)


model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = Lars(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]
for x, y in loader:
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
