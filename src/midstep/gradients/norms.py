"""Norms of tensors, right to 1e-6 of float64 at any size, magnitude and dtype.

Squares are summed in float32 over rows of 512 entries only; everything above a row, and short
tensors altogether, in float64. Summing a whole tensor in float32, as
`torch.nn.utils.clip_grad_norm_` does, is off by 7e-4 at 124M entries. Squares of entries beyond
1e18 overflow float32 and those below 1e-18 vanish; a tensor whose norm shows it is measured again,
divided by its largest entry first.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

__all__ = ["Norms", "combined_norm", "num_nonfinite", "tensor_norms", "unread_norms", "wide_dtype"]

# 32 additions in each of 16 vector lanes: equal entries, whose rounding errors all point the same
# way, stay within 6e-7 (measured over 6,000 values; 1,024 a row gives 1e-6, 4,096 gives 2e-6).
_ROW, _LANES = 512, 16
# bf16 and fp16 are widened in blocks that stay in cache: 10x the speed of torch's own bf16 norm.
_BLOCK = 2**20
_HALF = (torch.float16, torch.bfloat16)
# So many entries are added in float64 at once, which takes less time than two calls.
_SHORT = 2**13
# Far above what the squares of 10^11 entries can lose.
_SURELY_SAFE = 1e-9
# The least square of an entry that is not rounded away, by the dtype it is added in.
_TINY = {
    torch.float64: torch.finfo(torch.float64).tiny,
    torch.float32: torch.finfo(torch.float32).tiny,
    torch.float16: torch.finfo(torch.float32).tiny,
    torch.bfloat16: torch.finfo(torch.float32).tiny,
}


def combined_norm(norms: Sequence[float], p: float) -> float:
    """Combine the norms of the parts of a vector, in float64, at any magnitude.

    Example:
        >>> combined_norm([3.0, 4.0], 2.0), combined_norm([3.0, 4.0], math.inf)
        (5.0, 4.0)
    """
    if p == 2.0 and math.isfinite(total := math.hypot(*norms)):
        return total  # `hypot` scales by itself
    if any(math.isnan(n) for n in norms):
        return math.nan
    largest = max(norms, default=0.0)
    if math.isinf(p) or largest == 0.0 or math.isinf(largest):
        return largest
    try:
        total = largest * math.fsum((n / largest) ** p for n in norms) ** (1.0 / p)
    except OverflowError:
        total = math.inf
    return min(total, sys.float_info.max)


@torch.no_grad()
def tensor_norms(tensors: Sequence[Tensor], p: float = 2.0) -> list[float]:
    """Measure the norm of each tensor, right to 1e-6 of float64 at any magnitude.

    Reads each tensor once; once more those whose squares overflowed or vanished. One host sync a
    device, none on CPU.

    Args:
        tensors: Dense; any mixture of floating and complex dtypes and of devices.
        p: Order, greater than 0; inf for the largest magnitude.

    Example:
        >>> tensor_norms([torch.tensor([3.0, 4.0]), torch.full((2,), 1e30)])
        [5.0, 1.414...e+30]
    """
    return Norms(tensors, p).each()


class Norms:
    """The norms of some tensors, of all together and of each, from one read.

    On CPU what is asked decides what is computed: the norm of all together takes one addition over
    what the read left, those of each one for each. The first is the same number, to the last bit,
    whether or not the others were asked for.

    Args:
        tensors: Dense; any mixture of floating and complex dtypes and of devices. They are read
            here, and again only those whose squares overflowed or vanished, when it shows.
        p: Order, greater than 0; inf for the largest magnitude.

    Example:
        >>> norms = Norms([torch.tensor([3.0, 4.0]), torch.tensor([12.0])])
        >>> norms.total(), norms.each()
        (13.0, [5.0, 12.0])
    """

    __slots__ = ("_each", "_numbers", "_p", "_sizes", "_tensors", "_total")

    @torch.no_grad()
    def __init__(self, tensors: Sequence[Tensor], p: float = 2.0) -> None:
        self._tensors = [_real(t) for t in tensors] if p == 2.0 else tensors
        self._p = p
        self._each: list[float] | None = None
        self._total: float | None = None
        self._numbers: Tensor | None = None
        self._sizes: list[int] = []
        if p == 2.0 and tensors and all(t.is_cpu for t in tensors):
            # Numbers of the same L2 norm, 1 for each 512. Widened after all reads: between them it
            # would slow them by 4 %.
            parts = [t if t.numel() <= _SHORT else _rows(t) for t in self._tensors]
            flat: Tensor = _flatten_dense_tensors(parts)  # type: ignore[no-untyped-call]
            # A lone short gradient comes back as it is; what was read must not follow its changes.
            self._numbers = flat if len(parts) > 1 else flat.clone()
            self._sizes = [part.numel() for part in parts]

    def total(self) -> float:
        """Give the norm of all tensors together, as one vector."""
        if self._total is None:
            self._total = self._joint()
        return self._total

    @torch.no_grad()
    def each(self) -> list[float]:
        """Give the norm of each tensor."""
        if self._each is None:
            self._each = [
                n if _is_safe(n, t, self._p) else _careful_norm(t, self._p)
                for n, t in zip(self._found(), self._tensors, strict=True)
            ]
        return self._each

    def _joint(self) -> float:
        if self._numbers is not None:
            total = _norm(self._numbers, dtype=torch.float64).item()
            # Whatever overflowed shows, and what vanished is too little to show.
            if _SURELY_SAFE < total < math.inf:
                return total
        return combined_norm(self.each(), self._p)

    def _found(self) -> list[float]:
        """The norm of each, before any second look at the magnitudes."""
        if self._numbers is not None:
            numbers = torch.split(self._numbers.double(), self._sizes)
            return _to_host(torch._foreach_norm(numbers))
        return _l2(self._tensors) if self._p == 2.0 else _any_order(self._tensors, self._p)


def _l2(tensors: Sequence[Tensor]) -> list[float]:
    """The L2 norm of each tensor, some of which lie on an accelerator."""
    found = [Norms([t]).total() if t.is_cpu else 0.0 for t in tensors]
    # A reduction on an accelerator is a tree, so its float32 sums are short already.
    order: list[int] = []
    norms: list[Tensor] = []
    for is_half, dtype in ((False, None), (True, torch.float32)):
        alike = [i for i, t in enumerate(tensors) if not t.is_cpu and (t.dtype in _HALF) is is_half]
        if alike:
            order += alike
            norms += torch._foreach_norm([tensors[i] for i in alike], 2.0, dtype=dtype)
    for index, norm in zip(order, _to_host(norms), strict=True):
        found[index] = norm
    return found


@torch.no_grad()
def unread_norms(tensors: Sequence[Tensor], p: float = 2.0) -> Tensor:
    """Measure the norm of each tensor and leave the numbers on its device: no host sync.

    Nobody can look whether a square overflowed, so the squares are summed in float64 from the
    start, where those of float32 and half-precision entries of any magnitude fit. On an accelerator
    that is one read; on CPU it takes two to four times as long as `tensor_norms`.

    Args:
        tensors: Dense, real or complex, all on one device.
        p: 2, or inf for the largest magnitude.

    Returns:
        Shape [len(tensors)], float64; float32 on a device that has no float64.

    Example:
        >>> unread_norms([torch.tensor([3.0, 4.0]), torch.full((2,), 1e30)])
        tensor([5.0000e+00, 1.4142e+30], dtype=torch.float64)
    """
    real = [_real(t) for t in tensors]
    wide = wide_dtype(real[0].device)
    if math.isinf(p):
        return torch.stack([_largest(t).to(wide) for t in real])
    if real[0].is_cpu:
        return torch.stack([_unread_l2(t) for t in real])
    return torch.stack(list(torch._foreach_norm(real, 2.0, dtype=wide)))


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest dtype that a device computes in."""
    return torch.float32 if device.type == "mps" else torch.float64


def _unread_l2(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.float64:  # the squares of whose entries may leave its range
        largest = _largest(tensor)
        unit = torch.where((largest > 0.0) & (largest < math.inf), largest, 1.0)
        return unit * _norm(torch.stack([_norm(b / unit) for b in _blocks(tensor)]))
    if _is_short(tensor):
        return _norm(tensor, dtype=torch.float64)
    return _norm(torch.stack([_norm(b) for b in _widened(tensor, torch.float64)]))


def _is_short(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.numel() <= _SHORT


def _norm(
    tensor: Tensor, p: float = 2.0, *, dim: int | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(tensor, p, dim=dim, dtype=dtype)
    return found


def _rows(tensor: Tensor) -> Tensor:
    """The norm of each row of at most 512 entries."""
    is_half = tensor.dtype in _HALF
    if not is_half and tensor.is_contiguous():
        return _row_norms(tensor)
    flat = _flat(tensor)
    if is_half:
        return torch.cat([_row_norms(block) for block in _widened(flat, torch.float32)])
    if flat.is_contiguous():
        return _row_norms(flat)
    # The kernel would add one by one.
    return torch.cat([_row_norms(block.contiguous()) for block in _blocks(flat)])


def _widened(tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Give a tensor block by block in a wider dtype; each block lies where the one before did.

    A block made anew each time would be paid for in page faults wherever the allocator gives
    pages back: 17x instead of 3x (decision 6).
    """
    blocks = _blocks(tensor)
    buffer = torch.empty(blocks[0].numel(), dtype=dtype, device=tensor.device)
    for block in blocks:
        yield buffer[: block.numel()].copy_(block)


def _row_norms(tensor: Tensor) -> Tensor:
    num_entries = tensor.numel()
    if (length := _row_length(num_entries)) > 0:  # one view and one call instead of five
        return _norm(tensor.as_strided((num_entries // length, length), (length, 1)), dim=1)
    flat = tensor.view(-1)
    whole = num_entries // _ROW * _ROW
    rows = _norm(flat[:whole].view(-1, _ROW), dim=1)
    return torch.cat([rows, _norm(flat[whole:]).view(1)])


@functools.lru_cache(maxsize=4096)
def _row_length(num_entries: int) -> int:
    """The longest row, at most 512 and of whole vectors, that leaves no rest; 0 if none is long."""
    lengths = range(_ROW, _ROW // 2 - 1, -_LANES)
    return next((length for length in lengths if num_entries % length == 0), 0)


def _any_order(tensors: Sequence[Tensor], p: float) -> list[float]:
    """Other orders, in float64 from the start: powers leave float32 too soon to be worth trying."""
    if math.isinf(p) and not any(t.is_complex() for t in tensors):
        return _to_host([_largest(t) for t in tensors])
    return [_careful_norm(t, p) for t in tensors]


def _largest(tensor: Tensor) -> Tensor:
    """The largest magnitude of an entry; of a complex one, of its real or imaginary part."""
    if tensor.numel() == 0:
        return torch.zeros((), device=tensor.device)
    return _norm(_real(tensor), math.inf)


def _careful_norm(tensor: Tensor, p: float) -> float:
    """The norm in float64, divided by the largest entry first: two reads, any magnitude."""
    largest = _largest(tensor).item()
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    parts = [_norm(_divided(b, largest), p) for b in _blocks(tensor)]
    return min(largest * combined_norm(_to_host(parts), p), sys.float_info.max)


def _divided(tensor: Tensor, by: float) -> Tensor:
    if not tensor.is_complex():
        return tensor.double() / by
    # Part by part: a complex quotient multiplies by 1 / `by`, which subnormal numbers have not.
    return torch.view_as_complex(_real(tensor).double() / by)


def _is_safe(norm: float, tensor: Tensor, p: float) -> bool:
    """Whether no square can have overflowed or vanished, so that the first read stands."""
    if p != 2.0 or _SURELY_SAFE < norm < math.inf:
        return True
    # An entry below sqrt(tiny) loses its square, which is at most `tiny`; all of them together are
    # harmless when they are 1e-8 of the sum.
    added_in = torch.float64 if _is_short(tensor) else tensor.dtype
    floor = math.sqrt(max(tensor.numel(), 1) * _TINY[added_in] * 1e8)
    return floor < norm < math.inf


def _to_host(values: Sequence[Tensor]) -> list[float]:
    """Read many 0-d tensors with one sync a device."""
    if all(v.is_cpu for v in values):
        return [v.item() for v in values]
    by_device: dict[torch.device, list[int]] = {}
    for index, value in enumerate(values):
        by_device.setdefault(value.device, []).append(index)
    found = [0.0] * len(values)
    for indices in by_device.values():
        numbers = torch.stack([values[i].double() for i in indices]).tolist()
        for index, number in zip(indices, numbers, strict=True):
            found[index] = number
    return found


def _flat(tensor: Tensor) -> Tensor:
    """View a tensor as one dimension, in the order it lies in memory; copies only if it must."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1)


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(_flat(tensor), _BLOCK)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


@torch.no_grad()
def num_nonfinite(tensors: Sequence[Tensor]) -> list[int]:
    """Count the inf and nan entries of each tensor. Costs a pass and a host sync a device."""
    finite = [torch.stack([torch.isfinite(b).sum() for b in _blocks(t)]).sum() for t in tensors]
    return [t.numel() - int(n) for t, n in zip(tensors, _to_host(finite), strict=True)]
