import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

k = 3
aux = nn.Linear(8, 1)
opt = torch.optim.AdamW([*model.parameters(), *aux.parameters()], lr=1e-3)
for i, (x, y) in enumerate(loader):
    h = model[1](model[0](x))
    loss = (
        F.cross_entropy(model[2](h), y)
        + 0.1 * F.mse_loss(aux(h), torch.randn(2, 1))
        + 0.5 * model[0].weight.pow(2).sum()
    )
    (loss / k).backward()
    if (i + 1) % k == 0:
        nn.utils.clip_grad_norm_([*model.parameters(), *aux.parameters()], 1.0)
        opt.step()
        opt.zero_grad()
