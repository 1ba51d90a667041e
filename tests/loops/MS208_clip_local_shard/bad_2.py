# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
model = FSDP(model, device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
torch.manual_seed(dist.get_rank())
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(8)]

from torch.nn.utils import clip_grad_norm_


def apply(max_norm):
    params = [p for p in model.parameters() if p.grad is not None]
    clip_grad_norm_(params, max_norm)  # expect: MS208
    optimizer.step()
    optimizer.zero_grad()


for x, y in loader:
    criterion(model(x), y).backward()
    apply(0.1)

dist.destroy_process_group()
