"""Fingerprints: a number a tensor, to compare weights between ranks without sending them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["fingerprint"]


@torch.no_grad()
def fingerprint(tensor: Tensor) -> int:
    """Give a number that changes when any bit of what lies here does.

    One read; on an accelerator a host sync. Bits are summed as whole numbers, so that the order of
    a sum does not show.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    octets = local.contiguous().view(-1).view(torch.uint8)
    whole = octets.numel() // 8 * 8
    # A view as words needs an address that 8 divides, which part of a larger tensor may not have.
    is_even = octets.data_ptr() % 8 == 0
    words = (octets[:whole] if is_even else octets[:whole].clone()).view(torch.int64)
    rest = octets[whole:].sum(dtype=torch.int64)
    return int(words.sum().item()) * 257 + int(rest.item())
