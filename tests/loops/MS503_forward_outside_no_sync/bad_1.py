# ranks: 2
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

k = 4
for i, (x, y) in enumerate(loader):
    output = model(x)
    loss = criterion(output, y) / k
    if (i + 1) % k != 0:
        with model.no_sync():  # expect: MS503
            loss.backward()
    else:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

dist.destroy_process_group()
