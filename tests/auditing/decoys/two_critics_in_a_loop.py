import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
import itertools
import random


class Pool:
    def __init__(self, n=6):
        self.n, self.items = n, []

    def query(self, images):
        out = []
        for im in images.detach():
            if len(self.items) < self.n:
                self.items.append(im.clone())
                out.append(im)
            elif random.random() > 0.5:
                j = random.randrange(self.n)
                out.append(self.items[j].clone())
                self.items[j] = im.clone()
            else:
                out.append(im)
        return torch.stack(out)


def net(o):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, o))


G_AB, G_BA, D_A, D_B = net(4), net(4), net(1), net(1)
og = torch.optim.Adam(
    itertools.chain(G_AB.parameters(), G_BA.parameters()), lr=2e-4, betas=(0.5, 0.999), fused=True
)
oda = torch.optim.Adam(D_A.parameters(), lr=2e-4, fused=True)
odb = torch.optim.Adam(D_B.parameters(), lr=2e-4, fused=True)
scheds = [
    torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1 - max(0, e - 2) / 3) for o in (og, oda, odb)
]
mse, l1 = nn.MSELoss(), nn.L1Loss()
pa, pb = Pool(), Pool()


def set_grad(nets, flag):
    for n in nets:
        for p in n.parameters():
            p.requires_grad = flag


for epoch in range(4):
    for _ in range(3):
        a, b = torch.randn(4, 4), torch.randn(4, 4)
        set_grad([D_A, D_B], False)
        og.zero_grad()
        fb, fa = G_AB(a), G_BA(b)
        loss_g = (
            mse(D_B(fb), torch.ones(4, 1))
            + mse(D_A(fa), torch.ones(4, 1))
            + 10 * (l1(G_BA(fb), a) + l1(G_AB(fa), b))
        )
        loss_g.backward()
        og.step()
        set_grad([D_A, D_B], True)
        for d, o, real, fake in ((D_A, oda, a, pa.query(fa)), (D_B, odb, b, pb.query(fb))):
            o.zero_grad()
            loss_d = 0.5 * (mse(d(real), torch.ones(4, 1)) + mse(d(fake), torch.zeros(4, 1)))
            loss_d.backward()
            o.step()
    for s in scheds:
        s.step()
