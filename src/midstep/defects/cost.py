"""MS801 to MS803: what costs time or memory and buys nothing."""

from __future__ import annotations

from .defect import Defect, Level, Tool

__all__ = ["COST"]

COST = (
    Defect(
        code="MS801",
        name="item-every-microbatch",
        title="The host waits for the device with every microbatch.",
        level=Level.ADVICE,
        why="`.item()`, `float(loss)` or printing a tensor copies one number to the host, which "
        "waits until the device has finished everything before it.",
        effect="The device idles while the host prepares the next launch: often 5 to 20 % of a "
        "step on a fast device, nothing on a CPU.",
        fix="Sum `loss.detach()` on the device and read it once every so many updates.",
        bad="""\
total = 0.0
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    total += loss.item()  # MS801
""",
        good="""\
total = torch.zeros(())
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    total += loss.detach()
print(total.item())
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS802",
        name="optimizer-not-fused",
        title="The optimizer has a fused kernel that is not used.",
        level=Level.ADVICE,
        why="Adam, AdamW, SGD and Adagrad take `fused=True`, which is not the default.",
        effect="The step runs as many small kernels and reads the gradient several times; fused "
        "it is one pass.",
        fix="Pass `fused=True`.",
        bad="""\
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)  # MS802
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
""",
        good="""\
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS803",
        name="graph-kept-for-log",
        title="A running total of losses keeps the graph of every batch alive.",
        level=Level.WARNING,
        why="`total += loss` adds tensors that require a gradient, so the sum remembers how each "
        "was made.",
        effect="Memory grows with every batch until it runs out.",
        fix="Add `loss.detach()`, and read the sum with `.item()` when it is printed.",
        bad="""\
total = 0.0
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    total += loss  # MS803
""",
        good="""\
total = 0.0
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    total += loss.detach()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
)
