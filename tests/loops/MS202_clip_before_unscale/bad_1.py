import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]


class Trainer:
    def __init__(self):
        self.scaler, self.clip = scaler, 1.0

    def apply(self):
        torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)  # expect: MS202
        self.scaler.step(optimizer)
        self.scaler.update()

    def fit(self):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = criterion(model(x), y)
            self.scaler.scale(loss).backward()
            self.apply()


Trainer().fit()
