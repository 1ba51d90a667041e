"""MS101 to MS108: what the gradient of a window is divided by, and where a window ends."""

from __future__ import annotations

from .defect import Defect, Level, Tool

__all__ = ["ACCUMULATION"]

ACCUMULATION = (
    Defect(
        code="MS101",
        name="mean-of-means",
        title="Means over unequal numbers of targets are averaged as if they were equal.",
        level=Level.WARNING,
        why="A loss with ignored targets, a mask or class weights is a mean over what each "
        "microbatch happens to hold. Dividing by the number of microbatches gives each of these "
        "means the same weight.",
        effect="A target in a short microbatch weighs more than one in a long microbatch. The "
        "gradient depends on how the batch was cut, and is not that of the whole batch.",
        fix="Sum the loss, and divide by the number of targets (or the sum of weights) of the "
        "whole window, on all ranks.",
        bad="""\
k = 5
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y, ignore_index=0)  # MS101
    (loss / k).backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        good="""\
k = 5
for first in range(0, len(loader), k):
    window = loader[first : first + k]
    num_targets = sum((y != 0).sum() for _, y in window)
    for x, y in window:
        loss_sum = F.cross_entropy(model(x), y, ignore_index=0, reduction="sum")
        (loss_sum / num_targets).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        tools=(Tool.LINT, Tool.AUDIT, Tool.VERIFY),
    ),
    Defect(
        code="MS102",
        name="loss-divided-twice",
        title="The loss is divided twice on its way to the gradient.",
        level=Level.ERROR,
        why="Two places each own the division: the loss is already a mean over the window, or the "
        "framework's backward divides, and the loop divides by the number of microbatches as "
        "well. Or `.grad` itself is divided with every microbatch, and holds those before it, too.",
        effect="The gradient is k times too small. With SGD so is the rate; clipping, which "
        "compares the norm with a threshold, almost never fires.",
        fix="Keep one division: over the targets of the window, or by the framework.",
        bad="""\
k = 5
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    (loss / k).backward()  # MS102
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        good="""\
k = 5
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    (loss / k).backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        tools=(Tool.LINT, Tool.AUDIT, Tool.VERIFY),
    ),
    Defect(
        code="MS103",
        name="loss-not-divided",
        title="Mean losses are summed over a window and never divided.",
        level=Level.WARNING,
        why="`backward` adds to `.grad`. Of k mean losses it leaves the sum, which looks right "
        "because k = 1 is right.",
        effect="The gradient is k times too large: the rate is k times what was set, and clipping "
        "fires k times too early. A change of k changes the training.",
        fix="Divide each loss by the number of microbatches in the window, or sum the losses and "
        "divide by the number of targets.",
        bad="""\
k = 5
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    loss.backward()  # MS103
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
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
        tools=(Tool.LINT, Tool.AUDIT, Tool.VERIFY),
    ),
    Defect(
        code="MS104",
        name="tail-wrong-divisor",
        title="The short last window is stepped, but divided by the full length.",
        level=Level.WARNING,
        why="The condition that ends a window also fires on the last batch, while every loss is "
        "divided by k, the length of a full window.",
        effect="The last update of each pass has n / k of its gradient, n being what is left: with "
        "one microbatch of eight it is an eighth of the right one.",
        fix="Divide by the number of microbatches that the window really has.",
        bad="""\
k = 4
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k  # MS104
    loss.backward()
    if (i + 1) % k == 0 or i + 1 == len(loader):
        optimizer.step()
        optimizer.zero_grad()
""",
        good="""\
k = 4
for i, (x, y) in enumerate(loader):
    size = min(k, len(loader) - i // k * k)
    loss = F.cross_entropy(model(x), y) / size
    loss.backward()
    if (i + 1) % k == 0 or i + 1 == len(loader):
        optimizer.step()
        optimizer.zero_grad()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS105",
        name="tail-dropped",
        title="The gradients of the short last window are thrown away.",
        level=Level.ADVICE,
        why="The condition that ends a window does not fire on the last batch, and the next pass "
        "begins by clearing the gradients.",
        effect="The last `len(loader) % k` microbatches of every pass train nothing, though their "
        "forward and backward were paid for. Without shuffling they are always the same ones.",
        fix="Step on the last batch, too, dividing by the number of microbatches in that window; "
        "or cut the data so that every window is full.",
        bad="""\
k = 4
for epoch in range(2):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y) / k
        loss.backward()
        if (i + 1) % k == 0:  # MS105
            optimizer.step()
            optimizer.zero_grad()
""",
        good="""\
k = 4
for epoch in range(2):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        size = min(k, len(loader) - i // k * k)
        loss = F.cross_entropy(model(x), y) / size
        loss.backward()
        if (i + 1) % k == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS106",
        name="tail-carried",
        title="The short last window is left in `.grad` and added to the next pass.",
        level=Level.ADVICE,
        why="The condition that ends a window does not fire on the last batch, the index starts "
        "anew with the next pass, and nothing clears the gradients in between.",
        effect="The first update of the next pass sums more microbatches than it divides by, part "
        "of them computed with older weights.",
        fix="Step on the last batch, too, dividing by the number of microbatches in that window; "
        "or keep one counter across passes.",
        bad="""\
k = 4
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y) / k
        loss.backward()
        if (i + 1) % k == 0:  # MS106
            optimizer.step()
            optimizer.zero_grad()
""",
        good="""\
k, seen = 4, 0
for epoch in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y) / k
        loss.backward()
        seen += 1
        if seen % k == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS107",
        name="boundary-off-by-one",
        title="The window ends one microbatch away from where its length says.",
        level=Level.WARNING,
        why="`i % k == 0` with an index from 0 fires on the very first microbatch; `(i + 1) % k "
        "== 0` with an index from 1 fires one too early.",
        effect="The first update is made from one microbatch (or from k - 1) but divided by k, "
        "and every later window straddles the boundary that was meant.",
        fix="Use `(i + 1) % k == 0` with an index from 0, or `i % k == 0` with an index from 1.",
        bad="""\
k = 5
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    if i % k == 0:  # MS107
        optimizer.step()
        optimizer.zero_grad()
""",
        good="""\
k = 5
for i, (x, y) in enumerate(loader, start=1):
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS108",
        name="boundary-inverted",
        title="The loop steps on every microbatch except the last of each window.",
        level=Level.ERROR,
        why="The remainder is used as a truth value (`if i % k:`) or compared with `!= 0`, which "
        "is true between the boundaries and false on them.",
        effect="k - 1 updates a window instead of one, each from one microbatch with a fraction "
        "of its gradient. With k = 1 there is no update at all.",
        fix="Compare with zero: `(i + 1) % k == 0`.",
        bad="""\
k = 5
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    if (i + 1) % k:  # MS108
        optimizer.step()
        optimizer.zero_grad()
""",
        good="""\
k = 5
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    if not (i + 1) % k:
        optimizer.step()
        optimizer.zero_grad()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
)
