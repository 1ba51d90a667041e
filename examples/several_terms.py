"""Two loss terms, each over its own denominator: labelled positions, and rows."""

import torch

import midstep as ms

torch.manual_seed(0)
trunk = torch.nn.Linear(8, 16)
heads = torch.nn.ModuleDict({"tags": torch.nn.Linear(16, 5), "length": torch.nn.Linear(16, 1)})
model = torch.nn.ModuleDict({"trunk": trunk, "heads": heads})


def make_batch(rows):
    tags = torch.randint(0, 5, (rows, 12))
    tags[torch.rand(rows, 12) < 0.5] = -100
    return {"x": torch.randn(rows, 12, 8), "tags": tags, "length": torch.rand(rows)}


def count(batch):
    return {"tags": ms.targets(key="tags")(batch), "length": len(batch["length"])}


def loss(model, batch):
    hidden = torch.relu(model["trunk"](batch["x"]))
    length = model["heads"]["length"](hidden.mean(dim=1)).squeeze(1)
    return {
        "tags": ms.cross_entropy(model["heads"]["tags"](hidden), batch["tags"]),
        "length": (length - batch["length"]).square().sum(),
    }


updater = ms.Updater(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
batches = [make_batch(32) for _ in range(5)]
for window in updater.windows(batches, rows=10, count=count):  # each batch is one window, cut
    record = updater.update(window, loss)
    print(record, {term: round(mean, 3) for term, mean in record.loss_means.items()})
