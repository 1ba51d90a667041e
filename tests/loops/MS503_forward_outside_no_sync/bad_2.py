# ranks: 2
import contextlib

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
torch.manual_seed(dist.get_rank())
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(8)]

grad_accum = 2
for i, (x, y) in enumerate(loader):
    is_last = (i + 1) % grad_accum == 0
    loss = criterion(model(x), y) / grad_accum
    with contextlib.nullcontext() if is_last else model.no_sync():  # expect: MS503
        loss.backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()

dist.destroy_process_group()
