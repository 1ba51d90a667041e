import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
net = nn.Linear(4, 2)
opt = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
num_minibatches, accum = 4, 2
for it in range(3):
    obs, adv = torch.randn(32, 4), torch.randn(32)
    idx = torch.randperm(32)
    for mb in idx.chunk(num_minibatches):
        opt.zero_grad()
        for sub in mb.chunk(accum):
            lp = torch.log_softmax(net(obs[sub]), -1)[:, 0]
            loss = -(lp * adv[sub]).mean()
            (loss / accum).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()
