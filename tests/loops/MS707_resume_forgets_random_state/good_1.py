import os
import tempfile

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

path = os.path.join(tempfile.mkdtemp(), "run.pt")
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
    if step == 5:
        state = {"net": model.state_dict(), "optim": optimizer.state_dict(), "step": step}
        state["rng"] = torch.get_rng_state()
        torch.save(state, path)
state = torch.load(path)
model.load_state_dict(state["net"])
optimizer.load_state_dict(state["optim"])
torch.set_rng_state(state["rng"])
