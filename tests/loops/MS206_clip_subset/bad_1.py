import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
head = nn.Linear(3, 3)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

optimizer = torch.optim.AdamW(
    [{"params": model.parameters(), "lr": 1e-3}, {"params": head.parameters(), "lr": 1e-2}]
)
for x, y in loader:
    optimizer.zero_grad()
    criterion(head(model(x)), y).backward()
    nn.utils.clip_grad_norm_(head.parameters(), 1.0)  # expect: MS206
    optimizer.step()
