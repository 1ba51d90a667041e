"""MS301 to MS306: the gradient scaler's protocol, and sums that stall."""

from __future__ import annotations

from .defect import Defect, Level, Tool

__all__ = ["PRECISION"]

PRECISION = (
    Defect(
        code="MS301",
        name="unscale-twice",
        title="The same gradients are unscaled twice.",
        level=Level.ERROR,
        why="`unscale_` may be called once for each optimizer between two `update` calls. It is "
        "called once a microbatch, or in two places.",
        effect="torch stops with `unscale_() has already been called`; a division by hand on top "
        "makes the gradient smaller by the scale once more.",
        fix="Unscale once, after the last backward of the window.",
        bad="""\
scaler = torch.amp.GradScaler("cpu")
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.unscale_(optimizer)  # MS301
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
        stops_with="RuntimeError",
    ),
    Defect(
        code="MS302",
        name="scale-changed-in-window",
        title="The loss scale may change between the microbatches of one window.",
        level=Level.ERROR,
        why="`update` (or `unscale_`) runs with every microbatch, the step once a window.",
        effect="Gradients made with different scales are added and then divided by the last one; "
        "gradients that were unscaled early are added to scaled ones.",
        fix="Call `unscale_`, `step` and `update` together, once a window.",
        bad="""\
k = 5
scaler = torch.amp.GradScaler("cpu")
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    scaler.scale(loss).backward()
    if (i + 1) % k == 0:
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()  # MS302
""",
        good="""\
k = 5
scaler = torch.amp.GradScaler("cpu")
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    scaler.scale(loss).backward()
    if (i + 1) % k == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
        tools=(Tool.LINT, Tool.AUDIT),
        stops_with="AssertionError",
    ),
    Defect(
        code="MS303",
        name="scaler-update-missing",
        title="A way through the loop unscales or steps and never calls `update`.",
        level=Level.ERROR,
        why="`scaler.update()` is missing, or a `continue` for a bad batch jumps over it.",
        effect="The scale is never lowered or raised, and the next `unscale_` or `step` stops "
        "with an error because the scaler still believes the last one unfinished.",
        fix="Call `update` once for every window, skipped ones included: `scaler.step` skips by "
        "itself when the gradient is not finite.",
        bad="""\
scaler = torch.amp.GradScaler("cpu")
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # MS303
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm > 0.1:
        continue
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
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm <= 0.1:
        scaler.step(optimizer)
    scaler.update()
""",
        tools=(Tool.LINT, Tool.AUDIT),
        stops_with="RuntimeError",
    ),
    Defect(
        code="MS304",
        name="scaler-update-several",
        title="The scaler is updated several times for one set of gradients.",
        level=Level.ERROR,
        why="With two optimizers `update` follows each `step`. The first one may change the scale "
        "that the gradients of the second one were made with.",
        effect="The second optimizer is stepped with gradients divided by another scale (halved "
        "or doubled), and the scale grows twice as fast.",
        fix="Step all optimizers, then call `update` once.",
        bad="""\
head = nn.Linear(3, 3)
optimizer_head = torch.optim.SGD(head.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for x, y in loader:
    optimizer.zero_grad()
    optimizer_head.zero_grad()
    scaler.scale(F.cross_entropy(head(model(x)), y)).backward()
    scaler.step(optimizer)
    scaler.update()  # MS304
    scaler.step(optimizer_head)
    scaler.update()
""",
        good="""\
head = nn.Linear(3, 3)
optimizer_head = torch.optim.SGD(head.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for x, y in loader:
    optimizer.zero_grad()
    optimizer_head.zero_grad()
    scaler.scale(F.cross_entropy(head(model(x)), y)).backward()
    scaler.step(optimizer)
    scaler.step(optimizer_head)
    scaler.update()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS305",
        name="bfloat16-sum-stalls",
        title="Gradients are accumulated in bfloat16 or float16, where small terms are lost.",
        level=Level.ADVICE,
        why="`.grad` has the dtype of its parameter. bfloat16 has 8 bits: a term below 1/256 of "
        "the sum changes nothing.",
        effect="Late microbatches of a long window are lost in part or whole: 1000 terms of 1 sum "
        "to 256.",
        fix="Keep the parameters in float32 and use autocast, or accumulate in float32 "
        "(`param.grad_dtype = torch.float32`).",
        bad="""\
k = 5
model = model.to(torch.bfloat16)  # MS305
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x.bfloat16()).float(), y) / k
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        good="""\
k = 5
for i, (x, y) in enumerate(loader):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS306",
        name="step-on-scaled-gradients",
        title="The optimizer steps with gradients that still carry the loss scale.",
        level=Level.ERROR,
        why="The loss is scaled, but `optimizer.step()` is called and not "
        "`scaler.step(optimizer)`.",
        effect="The gradient is 65536 times too large. Adam hides it in part; SGD diverges, and "
        "clipping to a threshold hides the scale behind a wrong direction of the moments.",
        fix="Call `scaler.step(optimizer)` and `scaler.update()`.",
        bad="""\
scaler = torch.amp.GradScaler("cpu")
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    optimizer.step()  # MS306
""",
        good="""\
scaler = torch.amp.GradScaler("cpu")
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
)
