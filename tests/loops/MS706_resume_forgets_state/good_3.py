import os
import tempfile

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]
path = os.path.join(tempfile.mkdtemp(), "run.pt")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # without moments, nothing is lost

start_epoch = 0
if os.path.exists(path):
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["state_dict"])
    start_epoch = checkpoint["epoch"] + 1
for epoch in range(start_epoch, 3):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    torch.save({"epoch": epoch, "state_dict": model.state_dict()}, path)
