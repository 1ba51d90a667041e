"""Schedules: pure functions of the number of applied updates, of rates and of thresholds alike."""

import torch

import midstep as ms
from midstep.schedules import Scaled, cosine, linear, presets, warmup_stable_decay

TOTAL = 12
shapes = {
    "cosine": cosine(total=TOTAL, warmup=3, minimum=0.1),
    "warmup, stable, decay": warmup_stable_decay(total=TOTAL, warmup=3, stable=5),
    "Transformers' cosine": presets.hf_cosine(total=TOTAL, warmup=3),
    "torchtitan's": presets.torchtitan_wsd(warmup=3, stable=5, decay=4),
}
for name, schedule in shapes.items():
    print(f"{name:22}", " ".join(f"{schedule(step):.2f}" for step in range(TOTAL)))

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
threshold = Scaled(schedule=linear(total=TOTAL, minimum=0.25), by=2.0)  # from 2 down to 0.5
updater = ms.Updater(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    clip=ms.ByGlobalNorm(threshold),
    schedule=shapes["cosine"],
    nonfinite=ms.Skip(),
)


def loss(model, x):
    return (model(x) - x.sum(dim=1, keepdim=True)).square().sum()


batches = [torch.randn(16, 8) for _ in range(TOTAL + 1)]
batches[4][0, 0] = float("nan")  # skipped: rate and threshold wait
for window in updater.windows(batches, size=1, count=ms.rows()):
    record = updater.update(window, loss)
    print(f"{record.step:2} {threshold(max(0, record.step - 1)):.2f} {record}")
