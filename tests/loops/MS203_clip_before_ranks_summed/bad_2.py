# ranks: 2
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
torch.manual_seed(dist.get_rank())
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(8)]

for x, y in loader:
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)  # expect: MS203
    grads = [p.grad for p in model.parameters()]
    for grad in grads:
        dist.all_reduce(grad)
        grad.div_(dist.get_world_size())
    optimizer.step()

dist.destroy_process_group()
