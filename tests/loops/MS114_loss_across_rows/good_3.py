import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.img, self.txt = nn.Linear(6, 4), nn.Linear(5, 4)
        self.logit_scale = nn.Parameter(torch.ones([]))

    def forward(self, image, text):
        a = F.normalize(self.img(image), dim=-1)
        b = F.normalize(self.txt(text), dim=-1)
        logits = self.logit_scale.exp() * a @ b.t()
        target = torch.arange(len(logits))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


net = TwoTower()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
accum = 3
for i in range(6):
    image, text = torch.randn(4, 6), torch.randn(4, 5)
    loss = net(image, text)
    loss.backward()
    opt.step()
    opt.zero_grad()
