import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
image, text = nn.Linear(6, 4), nn.Linear(5, 4)
optimizer = torch.optim.Adam([*image.parameters(), *text.parameters()], lr=0.01)
pairs = [(torch.randn(4, 6), torch.randn(4, 5)) for _ in range(8)]


def contrastive(a, b):
    logits = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T / 0.07
    labels = torch.arange(len(a), device=a.device)
    rows = F.cross_entropy(logits, labels)  # expect[lint]: MS114
    return (rows + F.cross_entropy(logits.T, labels)) / 2


accum_freq = 4
for i, (a, b) in enumerate(pairs):
    loss = contrastive(image(a), text(b)) / accum_freq  # expect[audit]: MS114
    loss.backward()
    if (i + 1) % accum_freq == 0:
        optimizer.step()
        optimizer.zero_grad()
