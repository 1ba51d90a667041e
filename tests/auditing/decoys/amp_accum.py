import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

k = 4
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
sched = torch.optim.lr_scheduler.StepLR(optimizer, 2)
for i, (x, y) in enumerate(loader):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y) / k
    scaler.scale(loss).backward()
    if (i + 1) % k == 0:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            sched.step()
        optimizer.zero_grad()
