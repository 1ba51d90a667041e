import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

skipped = 0
for x, y in loader:
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    try:
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # expect: MS602
    except RuntimeError as error:
        skipped += 1
        continue
    optimizer.step()
