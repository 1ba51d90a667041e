import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for i, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    if i % 5 == 4:
        scaler.update(512.0)
