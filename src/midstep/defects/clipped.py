"""MS206 to MS211: clipping the wrong tensors, or reading the wrong norm."""

from __future__ import annotations

from .defect import Defect, Level, Tool

__all__ = ["CLIPPED"]

CLIPPED = (
    Defect(
        code="MS206",
        name="clip-subset",
        title="Only a part of what the optimizer steps is clipped.",
        level=Level.WARNING,
        why="The clip is given one module or one parameter group, the optimizer more of them.",
        effect="The rest is stepped with its whole gradient. A spike there is not bounded, and "
        "the reported norm does not show it.",
        fix="Give the clip the same parameters as the optimizer, in one call or in several.",
        bad="""\
head = nn.Linear(3, 3)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(head(model(x)), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # MS206
    optimizer.step()
""",
        good="""\
head = nn.Linear(3, 3)
params = [*model.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(params, lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(head(model(x)), y)
    loss.backward()
    nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS207",
        name="clip-exhausted-generator",
        title="The clip is given an iterator that is already used up.",
        level=Level.ERROR,
        why="`model.parameters()` and `filter(...)` can be read once. The optimizer, or the first "
        "clip, has read it to its end; torch says nothing about an empty one.",
        effect="The norm is 0 and nothing is clipped.",
        fix="Keep a list: `params = [p for p in model.parameters() if p.requires_grad]`.",
        bad="""\
params = filter(lambda p: p.requires_grad, model.parameters())
optimizer = torch.optim.SGD(params, lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(params, 1.0)  # MS207
    optimizer.step()
""",
        good="""\
params = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(params, lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS208",
        name="clip-local-shard",
        title="Each rank clips by the norm of its own shard.",
        level=Level.ERROR,
        why="Under FullyShardedDataParallel the parameters of a rank are its shard, and "
        "`torch.nn.utils.clip_grad_norm_` does not ask the other ranks.",
        effect="Every rank shrinks by another factor: the clipped gradient points elsewhere, and "
        "its norm exceeds the threshold.",
        fix="Call the clip of the model, `model.clip_grad_norm_(max_norm)`; with `fully_shard` "
        "give torch's function the sharded tensors themselves, not their local parts.",
        bad="""\
from torch.distributed.fsdp import FullyShardedDataParallel

model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # MS208
    optimizer.step()
""",
        good="""\
from torch.distributed.fsdp import FullyShardedDataParallel

model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS209",
        name="clipped-norm-logged",
        title="The norm that is logged was taken after clipping.",
        level=Level.WARNING,
        why="The norm is computed from `.grad` behind the clip, where it is at most the "
        "threshold. The clip itself returns the norm from before.",
        effect="The curve is a flat line at the threshold. A growing or exploding gradient does "
        "not show in it.",
        fix="Log what the clip returns.",
        bad="""\
norms = []
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]))  # MS209
    optimizer.step()
""",
        good="""\
norms = []
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    optimizer.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS210",
        name="clip-norm-overflow",
        title="Every gradient is finite and their norm is not.",
        level=Level.ERROR,
        why="The squares are summed in float32, which overflows for gradients of about 1e19. The "
        "clip then multiplies by threshold / inf = 0.",
        effect="All gradients become 0 and the step changes nothing, without a word. Gradients of "
        "1e-24 have the norm 0 in the same way.",
        fix="Use a norm that is scaled or summed in float64, as `midstep.clip_grad_norm_` does.",
        bad="""\
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y) * 1e20
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # MS210
    optimizer.step()
""",
        good="""\
import midstep as ms

for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y) * 1e20
    loss.backward()
    ms.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
        tools=(Tool.AUDIT,),
    ),
    Defect(
        code="MS211",
        name="clip-to-zero",
        title="The threshold of the clip is 0.",
        level=Level.ERROR,
        why="In many configurations 0 means off. For torch it is a threshold.",
        effect="Every gradient becomes 0: the training stands still, without a word.",
        fix="Leave the clip out, or pass `math.inf` to measure only.",
        bad="""\
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.0)  # MS211
    optimizer.step()
""",
        good="""\
import math

for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    optimizer.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
)
