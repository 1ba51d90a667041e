import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
image, text = nn.Linear(6, 4), nn.Linear(5, 4)
optimizer = torch.optim.Adam([*image.parameters(), *text.parameters()], lr=0.01)
pairs = [(torch.randn(4, 6), torch.randn(4, 5)) for _ in range(8)]


size = 4
for first in range(0, len(pairs), size):
    window = pairs[first : first + size]
    optimizer.zero_grad()
    rows = torch.cat([image(a) for a, _ in window])
    columns = torch.cat([text(b) for _, b in window])
    F.cross_entropy(rows @ columns.T, torch.arange(len(rows))).backward()
    optimizer.step()
