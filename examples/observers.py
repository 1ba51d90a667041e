"""See more of an update: how far each layer really moved, and which microbatch was bad."""

import torch

import midstep as ms
from midstep.sinks import OpenMetrics

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
batches = [(torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(40)]
batches[30] = (batches[30][0] * 30, batches[30][1])  # somebody forgot to normalise it

updater = ms.Updater(
    model,
    torch.optim.AdamW(model.parameters(), lr=0.01),
    clip=ms.ByGlobalNorm(1.0),
    observers=[
        ms.observers.GradNorms(every=5),  # every fifth update; the others cost nothing
        ms.observers.Updates(every=5),
        ms.observers.Microbatches(),
    ],
    sinks=[OpenMetrics("midstep.prom")],
)


def loss(model, batch):
    return ms.cross_entropy(model(batch[0]), batch[1])


for window in updater.windows(batches, size=4, count=ms.targets()):
    record = updater.update(window, loss)
    extra = record.extra
    if "outlier_microbatch" in extra:
        norms = ", ".join(f"{norm:.2f}" for norm in extra["microbatch_grad_norms"])
        print(f"update {record.update}: microbatch {extra['outlier_microbatch']} of {norms}")
    if "update_to_weight" in extra:
        shares = (f"{name} {share:.1e}" for name, share in extra["update_to_weight"].items())
        print(f"update {record.update} moved", ", ".join(shares))
