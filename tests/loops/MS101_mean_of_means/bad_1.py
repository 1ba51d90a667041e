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
loss_fn = nn.CrossEntropyLoss(ignore_index=-100)
optimizer.zero_grad()
for step, (ids, labels) in enumerate(batches(), start=1):
    loss = loss_fn(model(ids).flatten(0, 1), labels.flatten())  # expect: MS101
    loss = loss / accumulation_steps
    loss.backward()
    if step % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
