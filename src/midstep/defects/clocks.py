"""MS401 to MS405: when the schedule of the learning rate ticks."""

from __future__ import annotations

from .defect import Defect, Level, Tool

__all__ = ["CLOCKS"]

CLOCKS = (
    Defect(
        code="MS401",
        name="schedule-before-optimizer",
        title="The schedule moves before the optimizer has used its rate.",
        level=Level.WARNING,
        why="`scheduler.step()` stands in front of `optimizer.step()`, as it did before torch 1.1.",
        effect="The first rate of the schedule is never used, and every later one is early by one.",
        fix="Call `scheduler.step()` after `optimizer.step()`.",
        bad="""\
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    scheduler.step()  # MS401
    optimizer.step()
""",
        good="""\
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    scheduler.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS402",
        name="schedule-every-microbatch",
        title="The schedule ticks with every microbatch, the optimizer once a window.",
        level=Level.WARNING,
        why="`scheduler.step()` is not under the condition that ends a window.",
        effect="The rate runs through its schedule k times too fast: the warm-up is over early "
        "and the decay ends before the training does.",
        fix="Tick where the optimizer steps, under the same condition.",
        bad="""\
k = 5
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()  # MS402
""",
        good="""\
k = 5
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS403",
        name="schedule-on-skipped-step",
        title="The schedule ticks although the scaler skipped the step.",
        level=Level.WARNING,
        why="`scaler.step` leaves the optimizer out when the gradient is not finite, which "
        "happens in the first steps of nearly every float16 run. `scheduler.step()` does not "
        "know.",
        effect="The warm-up is shortened by every skipped step, and the schedule is ahead of the "
        "training from then on.",
        fix="Tick only when the step was taken: the scale after `update` is not below the one "
        "before.",
        bad="""\
scaler = torch.amp.GradScaler("cpu")
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x * 1000), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()  # MS403
""",
        good="""\
scaler = torch.amp.GradScaler("cpu")
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x * 1000), y)
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= scale:
        scheduler.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS404",
        name="schedule-world-size-times",
        title="The schedule ticks several times for one update.",
        level=Level.WARNING,
        why="A scheduler that a framework prepared ticks once for each process, or two places of "
        "the loop tick the same scheduler. Its length was counted in updates.",
        effect="On N processes the schedule is over after 1/N of the training.",
        fix="Tick once an update; where the framework ticks N times, multiply the length of the "
        "schedule by N.",
        bad="""\
world_size = 4
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=len(loader))
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    for _ in range(world_size):
        scheduler.step()  # MS404
""",
        good="""\
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=len(loader))
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    scheduler.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS405",
        name="schedule-past-end",
        title="The length of the schedule is counted in another unit than its ticks.",
        level=Level.WARNING,
        why="The length is given in epochs and the schedule ticks with every batch, or in batches "
        "and it ticks once a window.",
        effect="Past its end a cosine rises again and a one-cycle schedule stops with an error; "
        "one that is too long never reaches its last rate.",
        fix="Count the length in ticks: updates in the whole training, the short last window of "
        "each pass included.",
        bad="""\
epochs = 3
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
for epoch in range(epochs):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()  # MS405
""",
        good="""\
epochs = 3
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(loader))
for epoch in range(epochs):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
)
