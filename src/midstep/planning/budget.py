"""A budget: run as few blocks again as fit a model's activations into it, by measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from ..recomputing import Recompute, blocks_of, recompute
from ..snapshot import Buffers, RandomState
from .tradeoff import Runner

__all__ = ["recompute_within"]


def recompute_within(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    budget_bytes: int,
    *,
    blocks: Sequence[nn.Module] | None = None,
) -> Recompute | None:
    """Apply recompute to as few blocks as keep one forward and backward within a budget.

    Each block that is run again costs its forward once more, so the fewest blocks cost the least
    time. Where all of them, one by one, are not enough, they are run again k at a time, by the
    smallest k that fits.

    Costs about log2(L) + 1 forwards and backwards for L blocks, up to L more where all are needed.
    Weights stay, gradients are cleared, random state and buffers are put back.

    Args:
        model: With repeated blocks; changed in place by hooks.
        loss: Runs the model on a batch of the size that is to fit, and gives the loss. Shape [].
        budget_bytes: Most bytes that a forward and backward may hold beyond those held before:
            activations and gradients, not weights and optimizer state.
        blocks: Which may be run again; None for those `repeated_blocks` finds.

    Returns:
        A handle as of `recompute`; None where the model fits as it is.

    Raises:
        ValueError: No blocks were found, or nothing fits; names the least that was measured.

    Example:
        >>> import torch
        >>> block = lambda: nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
        >>> model = nn.Sequential(*(block() for _ in range(8)))
        >>> x = torch.randn(256, 8)
        >>> handle = recompute_within(model, lambda m: m(x).sum(), 700_000)
        >>> 0 < len(handle.names) < 8
        True
    """
    found = list(blocks_of(model).values()) if blocks is None else list(blocks)
    state, buffers = RandomState.capture(), Buffers(model)
    peaks: dict[tuple[int, int], int] = {}

    def peak(num_blocks: int, every: int) -> int:
        key = (num_blocks, every)
        if key not in peaks:
            run = Runner(model, loss, found[:num_blocks], state, buffers)
            peaks[key] = run.peak(every if num_blocks else 0)
        return peaks[key]

    try:
        Runner(model, loss, found, state, buffers).once(0)  # warm
        choice = _choice(len(found), budget_bytes, peak)
    finally:
        state.restore()
        buffers.restore()
        model.zero_grad()
    if choice is None:
        least = min(peaks.values())
        raise ValueError(
            f"`recompute_within(budget_bytes={budget_bytes:,})`: the least that a forward and "
            f"backward of `{type(model).__name__}` held was {least:,} bytes, however its "
            f"{len(found)} repeated blocks were run again. Raise the budget, or pass fewer rows."
        )
    num_blocks, every = choice
    return recompute(model, every=every, blocks=found[:num_blocks]) if num_blocks else None


def _choice(
    num_blocks: int, budget_bytes: int, peak: Callable[[int, int], int]
) -> tuple[int, int] | None:
    """Give how many blocks are run again and how many together; None where nothing fits."""
    if peak(0, 1) <= budget_bytes:
        return 0, 1
    if num_blocks and peak(num_blocks, 1) <= budget_bytes:
        low, high = 0, num_blocks  # low does not fit, high does
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if peak(middle, 1) <= budget_bytes else (middle, high)
        return high, 1
    for every in range(2, num_blocks + 1):
        if peak(num_blocks, every) <= budget_bytes:
            return num_blocks, every
    return None
