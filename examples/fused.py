"""A fused optimizer takes division and clip coefficient as one factor, in its own pass.

Other optimizers have the gradients multiplied first; the updates are the same to rounding.
"""

import copy

import torch

import midstep as ms

torch.manual_seed(0)
start = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10))
batches = [(torch.randn(n, 64), torch.randint(0, 10, (n,))) for n in (32, 32, 32, 9)]


def loss(model, batch):
    return ms.cross_entropy(model(batch[0]), batch[1])


def train(fused):
    model = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    updater = ms.Updater(model, optimizer, clip=ms.ByGlobalNorm(0.1))
    for _ in range(10):
        for window in updater.windows(batches, size=4):  # streamed: a division is open at the step
            record = updater.update(window, loss)
    return model, record


model, record = train(fused=True)
other, _ = train(fused=False)
print(record)
pairs = zip(model.parameters(), other.parameters(), strict=True)
print(
    f"fused and unfused weights differ by {max((a - b).abs().max().item() for a, b in pairs):.0e}"
)
length = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
print(f"`.grad` holds the clipped gradient, {length:.3f} long")
