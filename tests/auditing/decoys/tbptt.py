import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]

rnn, head = nn.GRU(4, 8), nn.Linear(8, 3)
opt = torch.optim.Adam([*rnn.parameters(), *head.parameters()])
h = None
for x, y in loader:
    out, h = rnn(x[None], h)
    h = h.detach()
    loss = F.cross_entropy(head(out[0]), y)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(rnn.parameters(), 1.0)
    nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    opt.step()
