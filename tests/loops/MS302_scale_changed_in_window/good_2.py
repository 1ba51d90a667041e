import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

for x, y in loader:
    optimizer.zero_grad()
    for rows, targets in zip(x.chunk(2), y.chunk(2)):
        scaler.scale(criterion(model(rows), targets) / 2).backward()
    scaler.step(optimizer)
    scaler.update()
