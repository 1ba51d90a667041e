import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
emb, rnn, head = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 20)
params = [*emb.parameters(), *rnn.parameters(), *head.parameters()]
opt = torch.optim.Adam(params, lr=1e-3, fused=True)
ids = torch.randint(20, (4, 33))
for _ in range(3):
    h = None
    opt.zero_grad()
    n = 4
    for x, y in zip(ids[:, :-1].chunk(n, dim=1), ids[:, 1:].chunk(n, dim=1)):
        out, h = rnn(emb(x), h)
        h = h.detach()
        (F.cross_entropy(head(out).flatten(0, 1), y.flatten()) / n).backward()
    opt.step()
