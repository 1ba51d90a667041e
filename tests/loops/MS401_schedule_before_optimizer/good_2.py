import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]


class Warmup:
    """A setter of the project's own: it writes the rate of the coming step."""

    def __init__(self):
        self.count = 0

    def step(self):
        self.count += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, self.count / 5)


lr_scheduler = Warmup()
for x, y in loader:
    lr_scheduler.step()
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
