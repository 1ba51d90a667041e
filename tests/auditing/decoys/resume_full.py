import io

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

sched = torch.optim.lr_scheduler.StepLR(optimizer, 4)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    sched.step()

f = io.BytesIO()
torch.save(
    {
        "m": model.state_dict(),
        "o": optimizer.state_dict(),
        "s": sched.state_dict(),
        "r": torch.get_rng_state(),
    },
    f,
)
f.seek(0)
s = torch.load(f)
model.load_state_dict(s["m"])
optimizer.load_state_dict(s["o"])
sched.load_state_dict(s["s"])
torch.set_rng_state(s["r"])
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    sched.step()
