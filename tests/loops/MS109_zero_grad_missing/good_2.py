import torch
import torch.nn as nn
import torch.nn.functional as F


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def data(batches=10):
    return [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(batches)]


class Trainer:
    def __init__(self):
        self.model, self.optimizer = build()

    def apply(self):
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def fit(self, batches):
        for x, y in batches:
            F.cross_entropy(self.model(x), y).backward()
            self.apply()


Trainer().fit(data())
