import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential as run

torch.manual_seed(0)
body = nn.Linear(4, 8)
block = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU())
head = nn.Linear(8, 3)
params = [*body.parameters(), *block.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(params, lr=0.1)
for _ in range(4):
    x, y = torch.randn(2, 4), torch.randint(3, (2,))
    optimizer.zero_grad()
    hidden = run(block, 2, body(x), use_reentrant=False, preserve_rng_state=False)  # expect: MS705
    nn.functional.cross_entropy(head(hidden), y).backward()
    optimizer.step()
