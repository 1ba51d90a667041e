import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]
loader[3][0][0, 0] = float("inf")


def train_step(x, y):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isnan(norm) or torch.isinf(norm):
        scaler.update()
        return None
    scaler.step(optimizer)
    scaler.update()
    return loss


for x, y in loader:
    train_step(x, y)
