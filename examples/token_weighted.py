"""Microbatches of few and many targets: the mean over targets, not the mean of their means."""

import copy

import torch

import midstep as ms

torch.manual_seed(0)
start = torch.nn.Sequential(torch.nn.Embedding(40, 16), torch.nn.Linear(16, 40)).double()


def make_batch(num_targets):
    ids, labels = torch.randint(0, 40, (2, 2, 12))
    labels.view(-1)[num_targets:] = -100  # as padding is, or a prompt that is not learned
    return ids, labels


batches = [make_batch(num_targets) for num_targets in (23, 3, 4, 12)]
ids, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))


def cross_entropy(model, ids, labels):
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


whole = copy.deepcopy(start)  # the four microbatches as one batch
cross_entropy(whole, ids, labels).backward()

usual = copy.deepcopy(start)  # divided by their number
for ids, labels in batches:
    (cross_entropy(usual, ids, labels) / len(batches)).backward()

exact = copy.deepcopy(start)
updater = ms.Updater(exact, torch.optim.SGD(exact.parameters(), lr=0.0))
for window in updater.windows(batches, size=4, count=ms.targets()):
    record = updater.update(
        window, lambda model, batch: ms.cross_entropy(model(batch[0]), batch[1])
    )

truth = gradient(whole)
for name, model in (("loss / 4", usual), ("midstep", exact)):
    print(f"{name}: off by {((gradient(model) - truth).norm() / truth.norm()).item():.1e}")
print(record)
