import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)  # expect: MS113
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().flatten(1))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(4, 2, 4), torch.randint(3, (4,))) for _ in range(8)]
accumulation_steps = 4
for i, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(x), y) / accumulation_steps
    loss.backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
