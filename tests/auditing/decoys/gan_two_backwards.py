import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

G, Dn = nn.Linear(4, 4), nn.Linear(4, 1)
og, od = torch.optim.Adam(G.parameters(), 1e-3), torch.optim.Adam(Dn.parameters(), 1e-3)
bce = nn.BCEWithLogitsLoss()


def d_loss(x, is_real):
    l = bce(Dn(x), torch.full((len(x), 1), float(is_real)))
    l.backward()
    return l


for x, _ in loader:
    od.zero_grad()
    fake = G(torch.randn(2, 4))
    real_l = d_loss(x, True)
    fake_l = d_loss(fake.detach(), False)
    od.step()
    og.zero_grad()
    bce(Dn(fake), torch.ones(2, 1)).backward()
    og.step()
