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


accumulation_steps, num_targets = 4, 0
for step, (ids, labels) in enumerate(batches(), start=1):
    logits = model(ids).flatten(0, 1)
    F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum").backward()
    num_targets += (labels != -100).sum()
    if step % accumulation_steps == 0:
        for p in model.parameters():
            p.grad.div_(num_targets)
        optimizer.step()
        optimizer.zero_grad()
        num_targets = 0
