"""MS109 to MS114: when gradients are cleared and stepped, and models that see other rows."""

from __future__ import annotations

from .defect import Defect, Level, Tool

__all__ = ["CLEARING"]

CLEARING = (
    Defect(
        code="MS109",
        name="zero-grad-missing",
        title="The gradients are never cleared between updates.",
        level=Level.ERROR,
        why="`backward` adds to `.grad`, and nothing sets it back.",
        effect="Every update repeats the gradients of all updates before it, computed with older "
        "weights. It acts like a momentum of 1: the norm grows and the training oscillates.",
        fix="Call `optimizer.zero_grad()` once for each update, right after `step` or before the "
        "first backward of the window.",
        bad="""\
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()  # MS109
""",
        good="""\
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS110",
        name="zero-grad-inside-window",
        title="The gradients are cleared with every microbatch, but stepped once a window.",
        level=Level.ERROR,
        why="`zero_grad` stayed where it was before accumulation was added: at the top of the "
        "loop.",
        effect="Only the last microbatch of a window trains, with 1/k of its gradient. The others "
        "are computed and thrown away.",
        fix="Move `zero_grad` next to `step`, under the same condition.",
        bad="""\
k = 5
for i, (x, y) in enumerate(loader):
    optimizer.zero_grad()  # MS110
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
""",
        good="""\
k = 5
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS111",
        name="zero-grad-before-step",
        title="The gradients are cleared between backward and step.",
        level=Level.ERROR,
        why="`zero_grad` stands after `backward` and before `step`.",
        effect="The optimizer finds no gradient (or zeros). Nothing is learned; weight decay and "
        "momentum may still move the weights.",
        fix="Clear before the first backward of a window or after the step.",
        bad="""\
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.zero_grad()  # MS111
    optimizer.step()
""",
        good="""\
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS112",
        name="step-every-microbatch",
        title="The optimizer steps on every microbatch although the loss is that of a window.",
        level=Level.ERROR,
        why="The loss is divided by the number of accumulated microbatches, but `step` is not "
        "under the condition that ends a window.",
        effect="There is no accumulation: k times as many updates, each from one microbatch with "
        "1/k of its gradient.",
        fix="Step and clear only when a window is complete.",
        bad="""\
accumulation_steps = 5
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / accumulation_steps
    loss.backward()
    optimizer.step()  # MS112
    if (i + 1) % accumulation_steps == 0:
        optimizer.zero_grad()
""",
        good="""\
accumulation_steps = 5
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / accumulation_steps
    loss.backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS113",
        name="batch-statistics",
        title="A layer takes its statistics from each microbatch, not from the whole batch.",
        level=Level.ADVICE,
        why="BatchNorm normalizes by the mean and variance of the rows it sees in one forward, "
        "and under accumulation it sees one microbatch.",
        effect="The accumulated gradient is not that of the large batch, and the running "
        "statistics move k times an update. No divisor can mend it.",
        fix="Use a layer that looks at one row (GroupNorm, LayerNorm), freeze the statistics "
        "(`eval()`), or choose microbatches large enough for statistics of their own.",
        bad="""\
k = 5
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))  # MS113
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        good="""\
k = 5
model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        tools=(Tool.LINT, Tool.AUDIT, Tool.VERIFY),
    ),
    Defect(
        code="MS114",
        name="loss-across-rows",
        title="A loss that compares rows with each other is accumulated.",
        level=Level.WARNING,
        why="A contrastive loss sets every row against the other rows of the same forward. Cut "
        "into microbatches, most of the pairs are never formed.",
        effect="k microbatches of n rows are not one batch of k n rows: each row meets n - 1 "
        "others instead of k n - 1. The task is easier and the gradient another one.",
        fix="Compute the embeddings of the whole window first and the loss once over all of them "
        "(cached gradients), or say that the small batch is what is meant.",
        bad="""\
k = 5
other = nn.Linear(4, 3)
optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
for i, (x, _) in enumerate(loader):
    logits = model(x) @ other(x).T
    labels = torch.arange(len(x))
    loss = F.cross_entropy(logits, labels) / k  # MS114
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        good="""\
k = 5
other = nn.Linear(4, 3)
optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
for first in range(0, len(loader), k):
    x = torch.cat([x for x, _ in loader[first : first + k]])
    logits = model(x) @ other(x).T
    labels = torch.arange(len(x))
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        tools=(Tool.LINT, Tool.AUDIT, Tool.VERIFY),
    ),
)
