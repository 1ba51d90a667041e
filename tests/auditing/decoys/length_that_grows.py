import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
accum = 1
done = 0
count = 0
for i in range(20):
    (F.cross_entropy(net(torch.randn(4, 4)), torch.randint(2, (4,))) / accum).backward()
    count += 1
    if count == accum:
        opt.step()
        opt.zero_grad()
        count = 0
        done += 1
        if done == 4:
            accum = 2
