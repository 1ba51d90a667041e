import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
criterion = nn.CrossEntropyLoss()
scaler = torch.amp.GradScaler("cpu")
loader = [(1000 * torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]


class Trainer:
    def __init__(self, optimizer, scaler):
        self.optimizer, self.scaler = optimizer, scaler
        self.sched = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)

    def fit(self):
        for i, (x, y) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = criterion(model(x), y) / 2
            self.scaler.scale(loss).backward()
            if (i + 1) % 2 == 0:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.sched.step()  # expect: MS403
                self.optimizer.zero_grad()


Trainer(optimizer, scaler).fit()
