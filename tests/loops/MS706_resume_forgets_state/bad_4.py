import os
import tempfile

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]
path = os.path.join(tempfile.mkdtemp(), "run.pt")


def train(epochs):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    if os.path.exists(path):
        state = torch.load(path)
        model.load_state_dict(state["model"])
        scheduler.load_state_dict(state["scheduler"])  # expect[audit]: MS706
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        scheduler.step()
        state = {"model": model.state_dict(), "scheduler": scheduler.state_dict(), "epoch": epoch}
        torch.save(state, path)  # expect[lint]: MS706


train(1)
train(1)
