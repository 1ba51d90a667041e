import torch
from torch import nn

torch.manual_seed(0)
encoder, head = nn.Linear(4, 8), nn.Linear(8, 3)
opt_encoder = torch.optim.SGD(encoder.parameters(), lr=0.1)
opt_head = torch.optim.SGD(head.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(10)]


class Trainer:
    def step(self, optimizer):
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()  # expect: MS304

    def fit(self):
        for x, y in loader:
            opt_encoder.zero_grad()
            opt_head.zero_grad()
            scaler.scale(criterion(head(encoder(x).relu()), y)).backward()
            self.step(opt_encoder)
            self.step(opt_head)


Trainer().fit()
