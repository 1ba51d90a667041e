"""The whole loop: exact accumulation, one clip, a schedule of applied updates."""

import torch

import midstep as ms

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
features, labels = torch.randn(400, 16), torch.randint(0, 4, (400,))
labels[torch.rand(400) < 0.3] = -100  # not every row has a label
data = torch.utils.data.TensorDataset(features, labels)
loader = torch.utils.data.DataLoader(data, batch_size=10, shuffle=True)

updater = ms.Updater(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    clip=ms.ByGlobalNorm(0.5),
    schedule=ms.schedules.cosine(total=20, warmup=2, minimum=0.1),
)


def loss(model, batch):
    x, y = batch
    return ms.cross_entropy(model(x), y)


for _ in range(2):
    for window in updater.windows(loader, size=4, count=ms.targets()):
        print(updater.update(window, loss))
