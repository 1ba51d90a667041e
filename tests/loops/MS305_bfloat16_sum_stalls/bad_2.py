import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 3)
model.to(dtype=torch.bfloat16)  # expect[lint]: MS305
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
grad_accum_steps = 64
optimizer.zero_grad()
for _ in range(grad_accum_steps):
    x, y = torch.randn(2, 4, dtype=torch.bfloat16), torch.randint(3, (2,))
    loss = F.cross_entropy(model(x).float(), y) / grad_accum_steps
    loss.backward()
optimizer.step()
