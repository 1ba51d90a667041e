import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

k = 4
optimizer.zero_grad()
for epoch in range(2):
    count = 0
    for x, y in loader:
        loss = criterion(model(x), y) / k
        loss.backward()
        count += 1
        if count % k == 0:  # expect: MS106
            optimizer.step()
            optimizer.zero_grad()
