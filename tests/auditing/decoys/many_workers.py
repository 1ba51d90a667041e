import gc

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]


gc.collect()
gc.freeze()
ld = DataLoader(
    TensorDataset(torch.randn(24, 4), torch.randint(3, (24,))), batch_size=4, num_workers=1
)
k = 3
for _epoch in range(2):
    for i, (x, y) in enumerate(ld):
        (F.cross_entropy(model(x), y) / k).backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
