import os
import tempfile

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]
path = os.path.join(tempfile.mkdtemp(), "run.pt")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    torch.save({"epoch": epoch, "model": model.state_dict()}, path)
best = torch.load(path)  # to be used, not to be trained on
model.load_state_dict(best["model"])
print(best["epoch"])
