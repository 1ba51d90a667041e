import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
emb, head = nn.Embedding(20, 4), nn.Linear(4, 3)
opt = torch.optim.SGD([*emb.parameters(), *head.parameters()], lr=0.1)
for _ in range(6):
    opt.zero_grad()
    F.cross_entropy(head(emb(torch.randint(20, (8,)))), torch.randint(3, (8,))).backward()
    emb.weight.grad[:10] = 0
    opt.step()

for _ in range(6):
    opt.zero_grad()
    F.cross_entropy(head(emb(torch.randint(20, (8,)))), torch.randint(3, (8,))).backward()
    emb.weight.grad[0].zero_()
    opt.step()
