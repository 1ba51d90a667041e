import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
image, text = nn.Linear(6, 4), nn.Linear(5, 4)
optimizer = torch.optim.Adam([*image.parameters(), *text.parameters()], lr=0.01)
pairs = [(torch.randn(4, 6), torch.randn(4, 5)) for _ in range(8)]


criterion = nn.CrossEntropyLoss()
grad_accum_steps = 4
stream = iter(pairs)
for _ in range(2):
    for _ in range(grad_accum_steps):
        a, b = next(stream)
        similarity = torch.matmul(image(a), text(b).t())
        target = torch.arange(similarity.size(0))
        loss = criterion(similarity, target) / grad_accum_steps  # expect: MS114
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
