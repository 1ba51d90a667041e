# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
torch.manual_seed(dist.get_rank())
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(8)]

for x, y in loader:
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()

dist.destroy_process_group()
