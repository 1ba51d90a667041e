import os
import tempfile

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]


class Trainer:
    def __init__(self):
        self.model, self.optimizer = model, optimizer
        self.path = os.path.join(tempfile.mkdtemp(), "run.pt")

    def save(self):
        state = self.model.state_dict(), self.optimizer.state_dict()
        torch.save(state, self.path)  # expect: MS707

    def load(self):
        weights, moments = torch.load(self.path)
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(moments)

    def fit(self):
        for x, y in loader:
            self.optimizer.zero_grad()
            criterion(self.model(x), y).backward()
            self.optimizer.step()


trainer = Trainer()
trainer.fit()
trainer.save()
trainer.load()
