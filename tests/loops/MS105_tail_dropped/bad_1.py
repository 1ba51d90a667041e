import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]

gradient_accumulation_steps = 4
for epoch in range(2):
    model.zero_grad()
    for step, (x, y) in enumerate(loader):
        loss = criterion(model(x), y) / gradient_accumulation_steps
        loss.backward()
        is_boundary = (step + 1) % gradient_accumulation_steps == 0
        if is_boundary:  # expect: MS105
            optimizer.step()
            model.zero_grad()
