"""Half precision: one scale a window, an overflow skipped and backed off, a nan refused."""

import torch

import midstep as ms

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 3))
updater = ms.Updater(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    clip=ms.ByGlobalNorm(1.0),
    precision=ms.FP16(init_scale=2.0**22),  # too large on purpose
)


def loss(model, batch):
    return ms.cross_entropy(model(batch[0]), batch[1])


batches = [(torch.randn(16, 8), torch.randint(0, 3, (16,))) for _ in range(24)]
for window in updater.windows(batches, size=2, count=ms.targets()):
    print(updater.update(window, loss))

batches[1][0][3, 2] = float("nan")
try:
    updater.update(batches[:3], loss, count=ms.targets())
except ms.NonFiniteGradient as error:
    print(error)
