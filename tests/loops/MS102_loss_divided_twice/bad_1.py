import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]


class Trainer:
    def __init__(self, accumulation_steps):
        self.accumulation_steps = accumulation_steps

    def loss(self, x, y):
        return criterion(model(x), y) / self.accumulation_steps

    def fit(self):
        for i, (x, y) in enumerate(loader):
            loss = self.loss(x, y)
            loss /= self.accumulation_steps  # expect: MS102
            loss.backward()
            if (i + 1) % self.accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()


Trainer(5).fit()
