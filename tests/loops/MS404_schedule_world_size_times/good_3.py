import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class PreparedScheduler:
    def __init__(self, scheduler, num_processes):
        self.scheduler, self.num_processes = scheduler, num_processes

    def step(self):
        for _ in range(self.num_processes):
            self.scheduler.step()


def train(world):
    model = nn.Linear(3, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    updates = 12
    sched = PreparedScheduler(
        torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=updates), world
    )
    rates = []
    for _ in range(updates):
        opt.zero_grad()
        F.mse_loss(model(torch.randn(4, 3)), torch.randn(4, 1)).backward()
        opt.step()
        sched.step()
        rates.append(opt.param_groups[0]["lr"])
    return rates


print(train(1))
