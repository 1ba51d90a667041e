import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(12)]


class NativeScaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, need_update=True):
        self._scaler.scale(loss).backward()
        if need_update:
            if clip_grad is not None:
                self._scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
            self._scaler.step(optimizer)
            self._scaler.update()


loss_scaler = NativeScaler()
accum, last = 5, len(loader) % 5
optimizer.zero_grad()
for i, (x, y) in enumerate(loader):
    need = (i + 1) % accum == 0 or i + 1 == len(loader)
    div = accum if i < len(loader) - last else last
    loss = F.cross_entropy(model(x), y) / div
    loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters(), need_update=need)
    if need:
        optimizer.zero_grad()
