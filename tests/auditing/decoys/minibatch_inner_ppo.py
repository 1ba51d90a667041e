import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

old = None
for x, y in loader[:4]:
    for _ in range(3):
        for idx in torch.randperm(2).split(1):
            logp = F.log_softmax(model(x[idx]), -1)
            ratio = (logp - logp.detach()).exp()[torch.arange(1), y[idx]]
            adv = torch.ones(1)
            loss = -torch.min(ratio * adv, torch.clamp(ratio, 0.8, 1.2) * adv).mean()
            ent = -(logp.exp() * logp).sum(-1).mean()
            optimizer.zero_grad()
            (loss - 0.01 * ent).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
