"""Two models trained against each other: a pass names several losses, and lets go of them."""

import torch
from torch import nn

torch.manual_seed(0)
maker, judge = nn.Linear(2, 4), nn.Linear(4, 1)
for_maker = torch.optim.SGD(maker.parameters(), lr=0.01, fused=True)
for_judge = torch.optim.SGD(judge.parameters(), lr=0.01, fused=True)
criterion = nn.BCEWithLogitsLoss()
for _ in range(8):
    for_judge.zero_grad()
    loss_real = criterion(judge(torch.randn(4, 4)), torch.ones(4, 1))
    loss_real.backward()
    made = maker(torch.randn(4, 2))
    loss_made = criterion(judge(made.detach()), torch.zeros(4, 1))
    loss_made.backward()
    loss_judge = loss_real + loss_made
    for_judge.step()
    for_maker.zero_grad()
    loss_maker = criterion(judge(made), torch.ones(4, 1))
    loss_maker.backward()
    for_maker.step()
assert float(loss_judge.detach()) > 0
assert float(loss_maker.detach()) > 0
