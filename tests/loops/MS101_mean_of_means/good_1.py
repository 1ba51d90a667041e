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


accumulation_steps = 4
window = []
for batch in batches():
    window.append(batch)
    if len(window) < accumulation_steps:
        continue
    num_targets = sum((labels != -100).sum() for _, labels in window)
    for ids, labels in window:
        logits = model(ids).flatten(0, 1)
        loss_sum = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        (loss_sum / num_targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    window = []
