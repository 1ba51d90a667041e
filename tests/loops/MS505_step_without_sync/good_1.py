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
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(6)]

accumulation_steps = 4
for i, (x, y) in enumerate(loader):
    sync = (i + 1) % accumulation_steps == 0 or i + 1 == len(loader)
    size = min(accumulation_steps, len(loader) - i // accumulation_steps * accumulation_steps)
    with contextlib.nullcontext() if sync else model.no_sync():
        loss = criterion(model(x), y) / size
        loss.backward()
    if sync:
        optimizer.step()
        optimizer.zero_grad()

dist.destroy_process_group()
