import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x).relu())


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(8):
    x, y = torch.randn(4, 4), torch.randint(3, (4,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    nn.utils.clip_grad_norm_(net.head.parameters(), 1.0)  # expect: MS206
    optimizer.step()
