import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

accum_iter = 5
for batch_idx, (x, y) in enumerate(loader):
    with torch.set_grad_enabled(True):
        loss = criterion(model(x), y)
        loss.backward()  # expect: MS103
        if (batch_idx + 1) % accum_iter == 0 or batch_idx + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
