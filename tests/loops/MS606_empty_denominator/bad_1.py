import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = []
for step in range(6):
    mask = torch.ones(2) if step != 3 else torch.zeros(2)
    loader.append((torch.randn(2, 4), torch.randint(3, (2,)), mask))

for x, y, mask in loader:
    optimizer.zero_grad()
    losses = F.cross_entropy(model(x), y, reduction="none")
    loss = (losses * mask).sum() / mask.sum()  # expect[audit]: MS606
    loss.backward()
    optimizer.step()  # expect[audit]: MS601
