# stops with: AssertionError
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

accumulation_steps = 5
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y) / accumulation_steps
    scaler.scale(loss).backward()
    if (i + 1) % accumulation_steps == 0:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()  # expect: MS302
