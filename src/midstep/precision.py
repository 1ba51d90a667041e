"""Precision: what the forward computes in, and what the loss is multiplied by in backward.

float16 has five exponent bits, so small gradients vanish unless the loss is scaled up; the scale is
one number for a whole window and moves only between windows. bfloat16 and float32 need none. The
order (backward, unscale, look, clip, step, move the scale) is the updater's, not the caller's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["BF16", "FP16", "FP32", "LossScale", "Precision"]


class Precision(Protocol):
    """What a forward runs in, and how its loss is scaled."""

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype autocast lowers matrix products to; None for no autocast."""
        ...

    def loss_scale(self) -> LossScale:
        """Make the loss scale of one run."""
        ...

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Refuse parameters this precision cannot train."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class FP32:
    """Run forward and backward in the dtype of the model; no autocast, no loss scale.

    The name is what it is for most models; a float64 or bfloat16 model stays what it is.

    Example:
        >>> FP32().autocast_dtype is None, FP32().loss_scale().value
        (True, 1.0)
    """

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """No autocast."""
        return None

    def loss_scale(self) -> LossScale:
        """Scale by 1, for ever."""
        return LossScale()

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Accept any parameters."""


@dataclasses.dataclass(frozen=True, slots=True)
class BF16:
    """Autocast the forward to bfloat16, keeping float32 weights; no loss scale.

    bfloat16 has the range of float32, so small gradients survive; it can still overflow, and the
    non-finite policy looks at it like at any other.

    Example:
        >>> BF16().autocast_dtype
        torch.bfloat16
    """

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """bfloat16."""
        return torch.bfloat16

    def loss_scale(self) -> LossScale:
        """Scale by 1, for ever."""
        return LossScale()

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Accept any parameters."""


@dataclasses.dataclass(frozen=True, slots=True)
class FP16:
    """Autocast the forward to float16, keeping float32 weights, and scale the loss.

        seed = scale / denominator;   after an overflow   scale <- scale * backoff_factor
        after `growth_interval` windows in a row without   scale <- scale * growth_factor

    The rule and the defaults of `torch.amp.GradScaler`; the state goes from one to the other. An
    overflow that the scale explains (finite losses, scale above 1) is skipped and backed off under
    any policy; what it cannot explain is the policy's.

    Attributes:
        init_scale: The first scale.
        growth_factor: Greater than 1.
        backoff_factor: Between 0 and 1.
        growth_interval: Windows without overflow before the scale grows.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> FP16(init_scale=1024.0).loss_scale().value
        1024.0

    Reference: Micikevicius et al. 2018, arXiv:1710.03740.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        fits = (
            0 < _float32(self.init_scale) < math.inf,
            1 < self.growth_factor < math.inf,
            0 < self.backoff_factor < 1,
            self.growth_interval >= 1,
        )
        if not all(fits):
            raise ValueError(
                f"`{self}`: init_scale must be positive and finite, growth_factor above 1, "
                "backoff_factor between 0 and 1 and growth_interval at least 1, or the scale could "
                "not both recover from an overflow and grow back."
            )

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """float16."""
        return torch.float16

    def loss_scale(self) -> LossScale:
        """Make a dynamic loss scale with these numbers."""
        return LossScale(
            self.init_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            is_dynamic=True,
        )

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Refuse float16 parameters, whose unscaled gradients would vanish again."""
        if any(p.dtype is torch.float16 for p in parameters):
            raise ValueError(
                "`FP16()` with float16 parameters: once unscaled, small gradients vanish in their "
                "own `.grad`, which is what scaling was for. Keep the parameters in float32; "
                "autocast lowers the matrix products."
            )


class LossScale:
    """What the loss is multiplied by in backward: dynamic in float16, 1 elsewhere.

    Its state is that of `torch.amp.GradScaler`, in both directions.

    Example:
        >>> scale = FP16(growth_interval=2).loss_scale()
        >>> scale.update(found_inf=True); scale.value
        32768.0
        >>> scale.update(found_inf=False); scale.update(found_inf=False); scale.value
        65536.0
    """

    __slots__ = (
        "_ahead",
        "_growth_tracker",
        "backoff_factor",
        "growth_factor",
        "growth_interval",
        "is_dynamic",
        "value",
    )

    def __init__(
        self,
        value: float = 1.0,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        is_dynamic: bool = False,
    ) -> None:
        self.value = _float32(value)
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.is_dynamic = is_dynamic
        self._growth_tracker = 0
        self._ahead: Tensor | None = None

    def update(self, *, found_inf: bool) -> None:
        """Move the scale after one attempted window."""
        if not self.is_dynamic:
            return
        self._ahead = None
        if found_inf:
            self._growth_tracker = 0
            lowered = _float32(self.value * self.backoff_factor)
            if lowered >= torch.finfo(torch.float32).tiny:  # a scale of 0 could never grow back
                self.value = lowered
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            self._growth_tracker = 0
            grown = _float32(self.value * self.growth_factor)
            if grown < math.inf:
                self.value = grown

    @property
    def ahead(self) -> float | Tensor:
        """The scale of the next window: a tensor while an update waits to be told to the host."""
        return self.value if self._ahead is None else self._ahead

    def update_unread(self, found_inf: Tensor) -> None:
        """Move the scale on the device, as `update` will once the host is told. No host sync.

        Args:
            found_inf: 1 after an overflow, else 0. Shape [], float32.
        """
        if not self.is_dynamic:
            return
        before = torch.full_like(found_inf, self.value)
        after = before.clone()
        tracker = torch.full_like(found_inf, self._growth_tracker, dtype=torch.int32)
        # As torch names them: scale, growth tracker, found_inf, growth, backoff, interval.
        torch._amp_update_scale_(
            after,
            tracker,
            found_inf,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
        )
        self._ahead = torch.where(after >= torch.finfo(torch.float32).tiny, after, before)

    def explains_overflow(self) -> bool:
        """Whether an overflow may come from the scale, so that a smaller one could cure it."""
        return self.is_dynamic and self.value > 1.0

    def state_dict(self) -> dict[str, Any]:
        """Give the state as `torch.amp.GradScaler.state_dict()` does; empty when not dynamic."""
        if not self.is_dynamic:
            return {}
        return {
            "scale": self.value,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of an earlier run, or of a `torch.amp.GradScaler`.

        Raises:
            ValueError: It is the state of a scaler and this precision has none, or the reverse.
        """
        if bool(state) is not self.is_dynamic:
            raise ValueError(
                f"The saved loss scale is {'on' if state else 'off'} and this precision has it "
                f"{'on' if self.is_dynamic else 'off'}. Load it with the precision it was saved "
                "with."
            )
        if not state:
            return
        self._ahead = None
        self.value = _float32(float(state["scale"]))
        self.growth_factor = float(state["growth_factor"])
        self.backoff_factor = float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])
        self._growth_tracker = int(state["_growth_tracker"])


def _float32(value: float) -> float:
    # torch keeps the scale in float32; rounded alike, both go the same way for any factor.
    return torch.tensor(value, dtype=torch.float32).item()


def autocast_of(
    precision: Precision, parameters: Sequence[Tensor]
) -> Callable[[], AbstractContextManager[Any]] | None:
    """Give what opens the autocast of one forward, where the parameters are; None without one."""
    dtype = precision.autocast_dtype
    if dtype is None:
        return None
    if not parameters:
        raise ValueError("The model has no parameter, so there is nothing to train.")
    return lambda: torch.autocast(parameters[0].device.type, dtype=dtype)
