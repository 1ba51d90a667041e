import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]


block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
opt = torch.optim.SGD([*model.parameters(), *block.parameters()], lr=0.1)
plain = nn.Linear(8, 8)
opt.add_param_group({"params": plain.parameters()})
for x, y in loader:
    opt.zero_grad()
    h = checkpoint(block, model[0](x), use_reentrant=True)
    h = checkpoint(plain, h, use_reentrant=False, preserve_rng_state=False)
    F.cross_entropy(model[2](h), y).backward()
    opt.step()
