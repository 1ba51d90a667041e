import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

k = 4
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / len(loader))
for i, (x, y) in enumerate(loader):
    (F.cross_entropy(model(x), y) / k).backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
    schedule.step()
