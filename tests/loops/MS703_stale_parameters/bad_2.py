import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.body(x).relu())


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net.head = nn.Linear(8, 3)  # expect: MS703
for _ in range(6):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(torch.randn(2, 4)), torch.randint(3, (2,))).backward()
    optimizer.step()
