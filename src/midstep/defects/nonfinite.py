"""MS601 to MS606: values that are not finite, and how they are hidden."""

from __future__ import annotations

from .defect import Defect, Level, Tool

__all__ = ["NON_FINITE"]

NON_FINITE = (
    Defect(
        code="MS601",
        name="nonfinite-norm-ignored",
        title="A step is taken although the norm of the gradient is not finite.",
        level=Level.ERROR,
        why="`clip_grad_norm_` multiplies by threshold / norm. For an infinite norm that is 0, "
        "and 0 x inf is nan; for a nan norm everything is nan.",
        effect="The weights and the moments become nan in one step, or all finite gradients "
        "become 0. Nothing recovers from it.",
        fix="Look at the norm that the clip returns and leave the step out when it is not finite; "
        "or pass `error_if_nonfinite=True`.",
        bad="""\
loader[3][0][0, 0] = float("inf")
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()  # MS601
""",
        good="""\
loader[3][0][0, 0] = float("inf")
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
""",
        tools=(Tool.AUDIT,),
    ),
    Defect(
        code="MS602",
        name="clip-error-not-raised",
        title="The loop waits for an error that the clip was not told to raise.",
        level=Level.WARNING,
        why="`clip_grad_norm_` raises for a norm that is not finite only with "
        "`error_if_nonfinite=True`. The `except` that was to skip the step is never reached.",
        effect="The step that was to be skipped is taken, with gradients of nan.",
        fix="Pass `error_if_nonfinite=True`.",
        bad="""\
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # MS602
    except RuntimeError:
        continue
    optimizer.step()
""",
        good="""\
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError:
        continue
    optimizer.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS603",
        name="nan-hidden-from-log",
        title="Losses that are not finite are left out of the log, but trained on.",
        level=Level.WARNING,
        why="A nan is filtered or replaced where the loss is logged (`nan_to_num`, `nanmean`, `if "
        "not isnan`), while the backward uses the loss as it is.",
        effect="The curve looks healthy while the weights are nan.",
        fix="Decide before the backward: skip the update and count it, and log what happened.",
        bad="""\
loader[3][0][0, 0] = float("inf")
total = 0.0
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if not torch.isnan(loss):
        total += loss.item()  # MS603
""",
        good="""\
loader[3][0][0, 0] = float("inf")
total = 0.0
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    if torch.isnan(loss):
        continue
    loss.backward()
    optimizer.step()
    total += loss.item()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS604",
        name="nonfinite-replaced",
        title="Gradients that are not finite are replaced by numbers, and the step is taken.",
        level=Level.WARNING,
        why="`nan_to_num_` (or a mask) turns nan into 0 in `.grad`, so nothing looks wrong "
        "afterwards.",
        effect="Momentum, weight decay, bias correction and the schedule act on a gradient that "
        "was made up. The cause of the nan is never seen.",
        fix="Leave the whole update out when the gradient is not finite, and count how often.",
        bad="""\
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    for p in model.parameters():
        p.grad.nan_to_num_(0.0)  # MS604
    optimizer.step()
""",
        good="""\
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if all(torch.isfinite(p.grad).all() for p in model.parameters()):
        optimizer.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS605",
        name="refused-gradient-kept",
        title="The gradients of a refused step stay in `.grad` and are added to the next.",
        level=Level.ERROR,
        why="`zero_grad` stands in the branch that steps. Where the step is left out because the "
        "gradient is not finite, nothing clears it.",
        effect="nan plus anything is nan: after one refusal every later step is refused, too.",
        fix="Clear the gradients in both branches.",
        bad="""\
loader[3][0][0, 0] = float("inf")
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
        optimizer.zero_grad()  # MS605
""",
        good="""\
loader[3][0][0, 0] = float("inf")
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS606",
        name="empty-denominator",
        title="A loss is divided by a count that is 0.",
        level=Level.ERROR,
        why="A microbatch in which every target is masked has nothing to take a mean of. 0 / 0 is "
        "nan, in the loss and, with a mean that is written by hand, in the gradient.",
        effect="One such microbatch makes the weights nan.",
        fix="Divide the sum by the count of the whole window, and leave out a window that has "
        "none.",
        bad="""\
masks = [torch.ones(2) for _ in loader]
masks[3].zero_()
for (x, y), mask in zip(loader, masks, strict=True):
    optimizer.zero_grad()
    losses = F.cross_entropy(model(x), y, reduction="none")
    loss = (losses * mask).sum() / mask.sum()  # MS606
    loss.backward()
    optimizer.step()
""",
        good="""\
masks = [torch.ones(2) for _ in loader]
masks[3].zero_()
for (x, y), mask in zip(loader, masks, strict=True):
    if not mask.any():
        continue
    optimizer.zero_grad()
    losses = F.cross_entropy(model(x), y, reduction="none")
    loss = (losses * mask).sum() / mask.sum()
    loss.backward()
    optimizer.step()
""",
        tools=(Tool.AUDIT,),
    ),
)
