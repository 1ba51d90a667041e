# ranks: 2
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
torch.manual_seed(dist.get_rank())
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(8)]

for x, y in loader:
    optimizer.zero_grad()
    mask = (y != dist.get_rank()).float()
    losses = F.cross_entropy(model(x), y, reduction="none")
    loss = (losses * mask).sum() / mask.sum().clamp(min=1)  # expect: MS501
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
