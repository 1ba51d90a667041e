"""The one pending factor on the gradients of an update.

What autograd left in `.grad` is the true gradient times a known number. That number, and whatever
clipping adds to it, is kept here as one pending factor and applied once: by the optimizer's own
kernel where it takes one, by a single multiplication otherwise, not at all when it is 1.

The factor is never rounded to bfloat16 or float16, which would turn every entry the same way, by up
to 0.4 %.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .memory import editable, part_from_each_other
from .norms import Norms, combined_norm, num_nonfinite, unread_norms

__all__ = ["Gradients", "multiply_"]

# float32 holds every factor in here with all its digits. One outside is applied in several passes.
_SMALLEST, _GREATEST = 2.0**-100, 2.0**100
_HALF = (torch.float16, torch.bfloat16)


class Gradients:
    """Every gradient that one optimizer is about to step with, each tensor once.

        true gradient = factor * .grad

    Measuring reads each gradient once; the result is kept until the numbers in `.grad` change. On
    CPU reading a norm is free; on an accelerator the first is one host sync.

    A gradient that cannot be multiplied in place, which autograd hardly ever makes, is replaced by
    a copy at once: sparse and not coalesced, expanded, made in inference mode, conjugated lazily,
    or in the memory of another gradient.

    Args:
        parameters: Those without a gradient are left out, repeated ones are taken once.
        factor: What `.grad` must be multiplied by to be the true gradient.
        part_of: Finds the numbers of a parameter's gradient, to be read and changed in place.

    Attributes:
        parameters: Those with a gradient.
        positions: Of each of them among all that were given, repeated ones left out.
        tensors: The gradient of each; of sparse ones the stored values.

    Raises:
        TypeError: A gradient is neither dense nor COO sparse.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([6.0, 8.0])
        >>> gradients = Gradients([weight], factor=0.5)
        >>> gradients.norm()
        5.0
        >>> gradients.mul_(0.2); gradients.apply_(); weight.grad
        tensor([0.6000, 0.8000])
    """

    __slots__ = ("_each", "_factor", "_norms", "parameters", "positions", "tensors")

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        factor: float = 1.0,
        part_of: Callable[[Tensor], Tensor] = editable,
    ) -> None:
        given = list(dict.fromkeys(parameters))
        self.positions = [i for i, p in enumerate(given) if p.grad is not None]
        self.parameters = [given[i] for i in self.positions]
        self.tensors = [part_of(p) for p in self.parameters]
        part_from_each_other(self.parameters, self.tensors)
        self._factor = factor
        self._each: list[float] | None = None  # a further factor for each tensor
        self._norms: dict[float, Norms] = {}  # of what lies in `.grad`, by order p

    def __len__(self) -> int:
        return len(self.tensors)

    def norms(self, p: float = 2.0) -> list[float]:
        """Give the true norm of each gradient, as the pending factors make it."""
        measured = self._each_measured(p)
        if self._each is None and self._factor == 1.0:
            return list(measured)
        return [n * abs(c) for n, c in zip(measured, self.factors, strict=True)]

    def norm(self, p: float = 2.0) -> float:
        r"""Give the true norm of all gradients together, as one vector.

            ||g||_p = (sum over tensors of ||g_i||_p^p)^(1/p),   the largest of them for p = inf

        Right to 1e-6 of float64 for finite entries of any magnitude; inf or nan exactly when an
        entry is. (A norm beyond the largest float64 is given as that.)
        """
        if self._each is None:
            total = self._measured(p).total()
            if total < sys.float_info.max:
                return total * abs(self._factor)
        return combined_norm(self.norms(p), p)

    def _measured(self, p: float) -> Norms:
        if p not in self._norms:
            self._norms[p] = Norms(self.tensors, p)
        return self._norms[p]

    def _each_measured(self, p: float) -> list[float]:
        """The norm of each gradient whole, pending factors left out."""
        return self._measured(p).each()

    def unread_norms(self, p: float, ride: Tensor) -> tuple[Tensor, Tensor]:
        """Measure the norm of each gradient, pending factors left out, and read none of them.

        Args:
            p: 2, or inf for the largest magnitude.
            ride: Numbers to sum over the ranks along the way.

        Returns:
            The norms, of shape [len(self)], wide; and the sums.
        """
        return unread_norms(self.tensors, p), ride

    @property
    def has_parts(self) -> bool:
        """Whether this rank knows only a part of them, so that others may have to be asked."""
        return False

    def whole_units(self, norms: Sequence[Tensor]) -> list[Tensor]:
        """Make the norms of whole units (rows, filters, vectors) out of those of what lies here.

        Args:
            norms: A float64 tensor for each gradient, of equally many numbers on all ranks that
                split its units.
        """
        return list(norms)

    def any_and_norm(self, flag: bool) -> tuple[bool, float]:
        """Say whether any rank says so, and measure the L2 norm anew. All ranks must ask alike."""
        return flag, self.norm()

    def mul_(self, factor: float) -> None:
        """Multiply every gradient, later, together with everything else."""
        self._factor *= factor

    def mul_each_(self, factors: Sequence[float]) -> None:
        """Multiply each gradient by its own number, later, together with everything else."""
        before = self._each or [1.0] * len(self.tensors)
        self._each = [a * b for a, b in zip(before, factors, strict=True)]

    def edit_(self, change: Callable[[list[Tensor]], object]) -> None:
        """Change the true gradients in place; what was measured is forgotten.

        Costs a pass for factors that are still pending, and what `change` costs.

        Args:
            change: Gets the gradients: dense, real or complex; of sparse ones the stored values.
        """
        self.apply_()
        with torch.no_grad():
            change(self.tensors)
        self._norms.clear()

    def apply_(self) -> None:
        """Bring the pending factors into `.grad`: one multiplication, none where they are 1."""
        multiply_(self.tensors, self.factors)
        self.hand_over_()

    @property
    def is_wide(self) -> bool:
        """Whether a gradient is in another dtype than its parameter, which no kernel steps with."""
        return any(
            p.dtype in _HALF and t.dtype is not p.dtype
            for t, p in zip(self.tensors, self.parameters, strict=True)
        )

    @torch.no_grad()
    def narrow_(self, further: Tensor | None = None) -> None:
        """Bring the pending factors into `.grad` and round it to its parameter's dtype, once.

        One pass, tensor by tensor, so that one wide gradient at a time is there twice.

        Args:
            further: A factor on the device, of all of them.
        """
        for index, (parameter, factor) in enumerate(
            zip(self.parameters, self.factors, strict=True)
        ):
            wide, by = self.tensors[index], factor
            if not _SMALLEST <= abs(by) <= _GREATEST:
                multiply_([wide], [by])
                by = 1.0
            by_all: float | Tensor = by if further is None else further * by
            if wide.dtype is parameter.dtype or parameter.dtype not in _HALF:
                wide.mul_(by_all)
                continue
            narrow = torch.empty_like(wide, dtype=parameter.dtype)
            torch.mul(wide, by_all, out=narrow)
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = self.tensors[index] = narrow
        self.hand_over_()

    @property
    def factor(self) -> float | None:
        """The pending factor; None where each tensor has its own."""
        return self._factor if self._each is None else None

    @property
    def factors(self) -> list[float]:
        """The pending factor of each tensor."""
        if self._each is None:
            return [self._factor] * len(self.tensors)
        return [self._factor * c for c in self._each]

    def hand_over_(self) -> None:
        """Note that somebody else, such as a fused optimizer, applies the pending factor."""
        if self._factor != 1.0 or self._each is not None:
            self._norms.clear()  # of the numbers before; those in `.grad` now are rounded anew
        self._factor, self._each = 1.0, None

    def is_finite_here(self) -> bool:
        """Whether every entry on this rank is finite. One read, kept for nobody."""
        return math.isfinite(Norms(self.tensors).total())

    def num_nonfinite(self) -> list[int]:
        """Count the inf and nan entries of each gradient. Costs a pass and a host sync."""
        return num_nonfinite(self.tensors)


@torch.no_grad()
def multiply_(tensors: Sequence[Tensor], factors: Sequence[float]) -> None:
    """Multiply each tensor by its number in place; a factor of 1 costs nothing.

    One pass; a further one for each factor that float32 cannot hold.

    Example:
        >>> tensor = torch.tensor([1e30, 2e30])
        >>> multiply_([tensor], [1e-48]); tensor  # float32 holds nothing below 1e-45
        tensor([1.0000e-18, 2.0000e-18])
    """
    left = [(t, f) for t, f in zip(tensors, factors, strict=True) if f != 1.0]
    while left:
        now = [_one_pass(f) for _, f in left]
        _multiply_once([t for t, _ in left], now)
        left = [
            (t, f / n) for (t, f), n in zip(left, now, strict=True) if f != n and math.isfinite(f)
        ]


def _one_pass(factor: float) -> float:
    """The part of a factor that float32 can hold: a power of two while there is more."""
    if factor == 0.0 or not math.isfinite(factor) or _SMALLEST <= abs(factor) <= _GREATEST:
        return factor
    return _SMALLEST if abs(factor) < 1.0 else _GREATEST


def _multiply_once(tensors: list[Tensor], factors: list[float]) -> None:
    if all(t.is_cpu for t in tensors) and len(set(factors)) == 1:
        # On CPU these loops round a Python number to the dtype of each tensor, but no tensor.
        torch._foreach_mul_(tensors, torch.tensor(factors[0], dtype=torch.float64))
        return
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}  # what one launch can take
    for index, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(index)
    for (device, _), indices in alike.items():
        if device.type == "cpu":
            for index in indices:
                tensors[index].mul_(factors[index])
        else:
            torch._foreach_mul_([tensors[i] for i in indices], [factors[i] for i in indices])
