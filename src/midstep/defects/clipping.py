"""MS201 to MS205: clipping at the wrong moment."""

from __future__ import annotations

from .defect import Defect, Level, Tool

__all__ = ["CLIPPING"]

CLIPPING = (
    Defect(
        code="MS201",
        name="clip-every-microbatch",
        title="The gradient is clipped with every microbatch instead of once a window.",
        level=Level.ERROR,
        why="The clip stands next to `backward` and not next to `step`, so it shrinks the sum of "
        "what was accumulated so far.",
        effect="Early microbatches are shrunk again and again and the direction is not that of "
        "the whole gradient, although the norm that is reported looks right.",
        fix="Clip once, after the last backward of the window and before the step.",
        bad="""\
k = 5
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # MS201
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
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS202",
        name="clip-before-unscale",
        title="The gradient is clipped while it still carries the loss scale.",
        level=Level.ERROR,
        why="With a gradient scaler `.grad` holds the gradient times the scale (65536 at first) "
        "until `unscale_` or `step` divides it. A clip in between compares the scaled norm.",
        effect="Nearly every gradient is cut to the threshold and then divided by the scale: the "
        "weights hardly move, and the loss curve is flat.",
        fix="Call `scaler.unscale_(optimizer)` before the clip.",
        bad="""\
scaler = torch.amp.GradScaler("cpu")
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # MS202
    scaler.step(optimizer)
    scaler.update()
""",
        good="""\
scaler = torch.amp.GradScaler("cpu")
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS203",
        name="clip-before-ranks-summed",
        title="Each rank clips its own gradient before the gradients are summed.",
        level=Level.ERROR,
        why="The clip runs inside `no_sync`, or before an `all_reduce` that is written by hand.",
        effect="Every rank shrinks by a factor of its own, so a rank with a large gradient counts "
        "less. The sum is not parallel to the true gradient and its norm is not bounded as meant.",
        fix="Reduce first, then clip the sum: the same factor on every rank.",
        bad="""\
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # MS203
    for p in model.parameters():
        torch.distributed.all_reduce(p.grad)
        p.grad /= torch.distributed.get_world_size()
    optimizer.step()
""",
        good="""\
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    for p in model.parameters():
        torch.distributed.all_reduce(p.grad)
        p.grad /= torch.distributed.get_world_size()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS204",
        name="clip-after-step",
        title="The gradient is clipped after the step that used it.",
        level=Level.ERROR,
        why="The clip stands behind `step`. It returns a norm as always, so a log looks right.",
        effect="Nothing is bounded: the step was taken with the whole gradient.",
        fix="Clip between the last backward and the step.",
        bad="""\
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # MS204
""",
        good="""\
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS205",
        name="clip-before-backward",
        title="The gradient is clipped before there is one.",
        level=Level.ERROR,
        why="The clip stands in front of `backward`, often inside the function that computes the "
        "loss. It finds no gradient, or that of an earlier microbatch.",
        effect="What the optimizer uses was never clipped.",
        fix="Clip between the last backward and the step.",
        bad="""\
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # MS205
    loss.backward()
    optimizer.step()
""",
        good="""\
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
)
