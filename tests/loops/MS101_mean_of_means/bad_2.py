import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)


def batches():
    for length in (7, 2, 5, 1, 6, 3, 4, 7):
        ids = torch.randint(16, (2, 8))
        labels = torch.randint(16, (2, 8))
        labels[:, length:] = -100
        yield ids, labels


class Config:
    grad_accum = 4


cfg = Config()
for i, (ids, labels) in enumerate(batches()):
    mask = (labels != -100).float()
    logits, targets = model(ids).transpose(1, 2), labels.clamp(min=0)
    losses = F.cross_entropy(logits, targets, reduction="none")  # expect[lint]: MS101
    loss = (losses * mask).sum() / mask.sum()  # expect[audit]: MS101
    (loss / cfg.grad_accum).backward()
    if (i + 1) % cfg.grad_accum == 0:
        optimizer.step()
        optimizer.zero_grad()
