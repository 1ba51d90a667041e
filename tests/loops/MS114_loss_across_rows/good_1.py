import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
image, text = nn.Linear(6, 4), nn.Linear(5, 4)
optimizer = torch.optim.Adam([*image.parameters(), *text.parameters()], lr=0.01)
pairs = [(torch.randn(4, 6), torch.randn(4, 5)) for _ in range(8)]


for a, b in pairs:
    optimizer.zero_grad()
    logits = image(a) @ text(b).T
    loss = F.cross_entropy(logits, torch.arange(len(a)))
    loss.backward()
    optimizer.step()
