import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

accumulation_steps = 5
batch_idx = 0
for x, y in loader:
    loss = criterion(model(x), y) / accumulation_steps
    loss.backward()
    batch_idx += 1
    if batch_idx % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
