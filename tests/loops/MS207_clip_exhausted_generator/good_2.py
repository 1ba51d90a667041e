import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]


class Trainer:
    def __init__(self, model):
        self.params = list(filter(lambda p: p.requires_grad, model.parameters()))
        self.optimizer = torch.optim.SGD(self.params, lr=0.1)

    def fit(self):
        for x, y in loader:
            self.optimizer.zero_grad()
            criterion(model(x), y).backward()
            nn.utils.clip_grad_norm_(self.params, 1.0)
            self.optimizer.step()


Trainer(model).fit()
