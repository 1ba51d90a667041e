"""Peaks: how many bytes are held at most while something runs, beyond what was held before.

On the CPU every allocation and release that torch's own allocator makes is read from its profiler,
so temporaries inside kernels count. On CUDA the allocator keeps the peak itself.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, autograd

__all__ = ["Peak", "peak_of", "storage_bytes"]


@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """What running something took.

    Attributes:
        num_bytes: Most bytes held at a time, beyond those held before.
        kept_bytes: What is still held afterwards, beyond those held before.
        seconds: How long it took, with the measuring.
        reserved_bytes: What the allocator of a CUDA device had reserved in all; None on the CPU.
    """

    num_bytes: int
    kept_bytes: int
    seconds: float
    reserved_bytes: int | None = None


def peak_of(action: Callable[[], object], device: torch.device | None = None) -> Peak:
    """Run something and give its peak.

    Costs the profiler's overhead on the CPU, about 2 microseconds an operation.

    Args:
        action: What to run; its result is let go before the kept bytes are read.
        device: Where it allocates; None for the CPU.

    Example:
        >>> peak_of(lambda: torch.zeros(1000).exp().sum().item()).num_bytes
        8000
    """
    if device is not None and device.type == "cuda":
        return _cuda_peak(action, device)
    config = autograd.ProfilerConfig(  # type: ignore[attr-defined]
        autograd.ProfilerState.CPU,  # type: ignore[attr-defined]
        False,  # report_input_shapes
        True,  # profile_memory
        False,  # with_stack
        False,  # with_flops
        False,  # with_modules
        torch._C._profiler._ExperimentalConfig(),  # noqa: SLF001 - what torch's own profiler passes
    )
    gc.collect()  # garbage of an earlier run would be released in this one, and count against it
    started = time.perf_counter()
    # Not `torch.profiler.profile`: that one writes lines of its own to stderr.
    autograd._enable_profiler_legacy(config)  # type: ignore[attr-defined] # noqa: SLF001
    try:
        action()
    finally:
        threads = autograd._disable_profiler_legacy()  # type: ignore[attr-defined] # noqa: SLF001
    seconds = time.perf_counter() - started
    held = most = 0
    for change in _changes(threads):
        held += change
        most = max(most, held)
    return Peak(most, held, seconds)


def _changes(threads: Any) -> Iterable[int]:
    """Every allocation (positive) and release (negative), in the order of time."""
    events = [event for thread in threads for event in thread]
    memory = [event for event in events if event.kind() == "memory_alloc"]
    if len(threads) > 1:
        first = memory[0] if memory else None
        memory.sort(key=lambda event: first.cpu_elapsed_us(event) if first is not None else 0)
    return (event.cpu_memory_usage() for event in memory)


def _cuda_peak(action: Callable[[], object], device: torch.device) -> Peak:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    started = time.perf_counter()
    action()
    torch.cuda.synchronize(device)
    return Peak(
        torch.cuda.max_memory_allocated(device) - before,
        torch.cuda.memory_allocated(device) - before,
        time.perf_counter() - started,
        torch.cuda.max_memory_reserved(device),
    )


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Add up the bytes behind tensors, each storage once.

    Args:
        tensors: May be views of each other.

    Example:
        >>> x = torch.zeros(10)
        >>> storage_bytes([x, x[:5], torch.zeros(1)])
        44
    """
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()  # noqa: SLF001 - the identity of a storage
    return sum(storages.values())
