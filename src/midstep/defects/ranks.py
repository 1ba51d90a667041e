"""MS501 to MS506: training on several ranks."""

from __future__ import annotations

from .defect import Defect, Level, Tool

__all__ = ["RANKS"]

RANKS = (
    Defect(
        code="MS501",
        name="rank-local-denominator",
        title="Each rank divides by its own number of targets, and the ranks are averaged.",
        level=Level.WARNING,
        why="The data-parallel mean gives every rank the same weight, whatever it counted.",
        effect="A target on a rank with few of them weighs more than one on a rank with many: the "
        "gradient is not that of the whole batch, and depends on the number of ranks.",
        fix="Sum the count over all ranks, divide by it, and multiply by the number of ranks to "
        "undo the mean.",
        bad="""\
model = nn.parallel.DistributedDataParallel(model)
for x, y in loader:
    optimizer.zero_grad()
    loss_sum = F.cross_entropy(model(x), y, ignore_index=0, reduction="sum")
    num_targets = (y != 0).sum()
    loss = loss_sum / num_targets.clamp(min=1)  # MS501
    loss.backward()
    optimizer.step()
""",
        good="""\
model = nn.parallel.DistributedDataParallel(model)
world_size = torch.distributed.get_world_size()
for x, y in loader:
    optimizer.zero_grad()
    loss_sum = F.cross_entropy(model(x), y, ignore_index=0, reduction="sum")
    num_targets = (y != 0).sum()
    torch.distributed.all_reduce(num_targets)
    loss = loss_sum * world_size / num_targets.clamp(min=1)
    loss.backward()
    optimizer.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS502",
        name="world-size-divided-again",
        title="A loss that is divided by the global count is averaged over the ranks once more.",
        level=Level.ERROR,
        why="The count was summed over all ranks, so the gradients need a sum. The data-parallel "
        "wrapper takes their mean.",
        effect="The gradient is smaller by the number of ranks. Adam hides it until clipping or "
        "weight decay shows it.",
        fix="Multiply the loss by the number of (data-parallel) ranks.",
        bad="""\
model = nn.parallel.DistributedDataParallel(model)
for x, y in loader:
    optimizer.zero_grad()
    loss_sum = F.cross_entropy(model(x), y, ignore_index=0, reduction="sum")
    num_targets = (y != 0).sum()
    torch.distributed.all_reduce(num_targets)
    loss = loss_sum / num_targets.clamp(min=1)  # MS502
    loss.backward()
    optimizer.step()
""",
        good="""\
model = nn.parallel.DistributedDataParallel(model)
world_size = torch.distributed.get_world_size()
for x, y in loader:
    optimizer.zero_grad()
    loss_sum = F.cross_entropy(model(x), y, ignore_index=0, reduction="sum")
    num_targets = (y != 0).sum()
    torch.distributed.all_reduce(num_targets)
    loss = loss_sum * world_size / num_targets.clamp(min=1)
    loss.backward()
    optimizer.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS503",
        name="forward-outside-no-sync",
        title="Only the backward stands inside `no_sync`.",
        level=Level.WARNING,
        why="DistributedDataParallel decides in the forward whether the coming backward "
        "communicates. `no_sync` around the backward alone comes too late.",
        effect="Every microbatch is reduced: the communication that was to be saved is paid k "
        "times. The gradient is the same.",
        fix="Put the forward and the backward inside the context.",
        bad="""\
k = 5
model = nn.parallel.DistributedDataParallel(model)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    if (i + 1) % k != 0:
        with model.no_sync():  # MS503
            loss.backward()
    else:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
        good="""\
k = 5
model = nn.parallel.DistributedDataParallel(model)
for i, (x, y) in enumerate(loader):
    if (i + 1) % k != 0:
        with model.no_sync():
            loss = F.cross_entropy(model(x), y) / k
            loss.backward()
    else:
        loss = F.cross_entropy(model(x), y) / k
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS504",
        name="sync-every-microbatch",
        title="The ranks communicate with every microbatch, although they step once a window.",
        level=Level.ADVICE,
        why="DistributedDataParallel reduces in every backward unless it stands inside `no_sync`.",
        effect="k times the communication. The gradient is the same.",
        fix="Run the forward and backward of all but the last microbatch inside `model.no_sync()`.",
        bad="""\
k = 5
model = nn.parallel.DistributedDataParallel(model)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()  # MS504
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        good="""\
import contextlib

k = 5
model = nn.parallel.DistributedDataParallel(model)
for i, (x, y) in enumerate(loader):
    is_last = (i + 1) % k == 0
    with contextlib.nullcontext() if is_last else model.no_sync():
        loss = F.cross_entropy(model(x), y) / k
        loss.backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS505",
        name="step-without-sync",
        title="The optimizer steps with gradients that were not summed over the ranks.",
        level=Level.ERROR,
        why="The step runs after a backward inside `no_sync`: the condition for communicating and "
        "the one for stepping are not the same.",
        effect="The ranks apply gradients of their own and drift apart, without an error. What is "
        "saved is the model of one rank.",
        fix="Leave `no_sync` for the last microbatch of every window, and step only there.",
        bad="""\
k = 5
model = nn.parallel.DistributedDataParallel(model)
for i, (x, y) in enumerate(loader):
    with model.no_sync():
        loss = F.cross_entropy(model(x), y) / k
        loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()  # MS505
        optimizer.zero_grad()
""",
        good="""\
import contextlib

k = 5
model = nn.parallel.DistributedDataParallel(model)
for i, (x, y) in enumerate(loader):
    is_last = (i + 1) % k == 0
    with contextlib.nullcontext() if is_last else model.no_sync():
        loss = F.cross_entropy(model(x), y) / k
        loss.backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS506",
        name="one-rank-skips",
        title="A rank decides by itself to leave out a backward that the others wait for.",
        level=Level.WARNING,
        why="A `continue` on a bad loss is decided from local data, before the backward in which "
        "all ranks meet.",
        effect="The other ranks wait in the reduction until it times out, or pair it with the "
        "next microbatch of the rank that skipped.",
        fix="Decide together: reduce the flag over all ranks first, or run the backward with a "
        "weight of 0.",
        bad="""\
model = nn.parallel.DistributedDataParallel(model)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    if not torch.isfinite(loss):
        continue  # MS506
    loss.backward()
    optimizer.step()
""",
        good="""\
model = nn.parallel.DistributedDataParallel(model)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    num_bad = (~torch.isfinite(loss)).float()
    torch.distributed.all_reduce(num_bad)
    if num_bad > 0:
        continue
    loss.backward()
    optimizer.step()
""",
        tools=(Tool.LINT,),
    ),
)
