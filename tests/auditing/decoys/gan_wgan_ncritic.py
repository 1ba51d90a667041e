import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

G, Dn = nn.Linear(4, 4), nn.Linear(4, 1)
og, od = torch.optim.RMSprop(G.parameters(), 1e-3), torch.optim.RMSprop(Dn.parameters(), 1e-3)
one, minus = torch.tensor(1.0), torch.tensor(-1.0)
for i, (x, _) in enumerate(loader):
    Dn.zero_grad()
    e1 = Dn(x).mean()
    e1.backward(minus)
    e2 = Dn(G(torch.randn(2, 4)).detach()).mean()
    e2.backward(one)
    od.step()
    for p in Dn.parameters():
        p.data.clamp_(-0.01, 0.01)
    if i % 5 == 4:
        G.zero_grad()
        Dn(G(torch.randn(2, 4))).mean().backward(minus)
        og.step()
