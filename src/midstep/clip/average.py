"""Clipping each tensor against the running average of its own norm."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from ..gradients import Gradients
from .checks import check_between, check_count
from .rule import (
    Attempt,
    Decision,
    MeasuresLength,
    Threshold,
    at_step,
    check_threshold,
    shrink,
    shrink_all,
    shrink_each,
)

__all__ = ["ByTensorAverage"]


@dataclasses.dataclass(slots=True)
class _Memory:
    """What became of each tensor.

    Attributes:
        num_updates: Applied updates seen.
        averages: Of the clipped norm of each tensor, by its position among the parameters.
    """

    num_updates: int = 0
    averages: dict[int, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class ByTensorAverage(MeasuresLength):
    r"""Clip each tensor where it outgrows the running average of its own norm, and all at a cap.

        g_i <- g_i * min(1, factor * max(average_i, floor) / ||g_i||)
        g <- g * min(1, cap / ||g||)
        average_i <- beta * average_i + (1 - beta) * ||g_i|| as clipped

    During the warm-up only the cap holds, and average_i is the smallest norm so far. A spike in one
    layer is cut there and leaves the others alone; the direction of the whole gradient changes.

    An average grows by at most (factor - 1) * (1 - beta) an update: 0.1 % by default, so that a
    lasting doubling takes 694 updates. Zero gradients do not count, neither as a minimum nor later:
    an average of zero would erase its tensor for ever. A tensor whose first gradient comes after
    the warm-up starts from that one. Costs nothing beside the norms. Tensors are told apart by
    their position in the optimizer, so a checkpoint fits the same optimizer as its own state does.

    Attributes:
        factor: How far above its average a norm may be; greater than 1.
        beta: Share of the old average that each update keeps, between 0 and 1.
        warmup: Applied updates before averages are held against anything.
        floor: The least an average counts as, so that tensors that hardly move are left alone; in
            units of the norm of one tensor.
        cap: Bounds the norm of all gradients at every step; a number, or a function of the number
            of applied updates. `math.inf` leaves the warm-up without protection.

    Raises:
        ValueError: `factor` is not greater than 1, `beta` is not between 0 and 1, `warmup` is less
            than 1, or `floor` or `cap` is not greater than 0.

    Example:
        >>> import torch
        >>> rule, weight = ByTensorAverage(factor=1.5, warmup=1), torch.nn.Parameter(torch.zeros(1))
        >>> for norm in (0.4, 0.8):
        ...     weight.grad = torch.tensor([norm])
        ...     decision = rule.decide(Gradients([weight]), Attempt(step=0))
        ...     rule.commit(decision)
        >>> round(decision.coefficient, 6)  # from 0.8 to 1.5 * 0.4
        0.75

    Reference: Wang et al. 2025, arXiv:2502.11034 (AdaGC), with the floor and the rule for zeros
    added.
    """

    factor: float = 1.05
    beta: float = 0.98
    warmup: int = 100
    floor: float = 1e-3
    cap: Threshold = 1.0
    needs_each: ClassVar[bool] = True
    _memory: _Memory = dataclasses.field(
        init=False, repr=False, compare=False, default_factory=_Memory
    )

    def __post_init__(self) -> None:
        name = "ByTensorAverage"
        check_between("factor", self.factor, name, 1, why="no norm could ever grow otherwise")
        check_between("beta", self.beta, name, 0, 1, why="it is the share that is kept")
        check_count("warmup", self.warmup, name, 1, why="an average needs a first norm")
        check_between("floor", self.floor, name, 0, why="an average of 0 erases its tensor")
        check_threshold("cap", self.cap, name)

    def decide(self, gradients: Gradients, attempt: Attempt) -> Decision:
        """Shrink each gradient that outgrew its average, then all that is left by the cap."""
        cap = at_step("cap", self.cap, attempt.step, "ByTensorAverage")
        factors = [
            shrink(norm, self._limit(position))
            for position, norm in zip(gradients.positions, gradients.norms(), strict=True)
        ]
        each = shrink_each(gradients, factors, p=2.0)
        whole = shrink_all(gradients, cap)
        assert each.coefficient is not None
        assert whole.coefficient is not None
        return Decision(
            clipped=each.clipped or whole.clipped,
            coefficient=each.coefficient * whole.coefficient,
            threshold=cap,
            seen=dict(zip(gradients.positions, gradients.norms(), strict=True)),
        )

    def _limit(self, position: int) -> float:
        average = self._memory.averages.get(position)
        if average is None or self._memory.num_updates < self.warmup:
            return math.inf  # nothing to hold it against but the cap
        return self.factor * max(average, self.floor)

    def commit(self, decision: Decision) -> None:
        """Move the average of each tensor by its norm as clipped."""
        memory = self._memory
        for position, norm in decision.seen.items():
            if norm == 0.0:
                continue
            average = memory.averages.get(position)
            if average is None:
                memory.averages[position] = norm
            elif memory.num_updates < self.warmup:
                memory.averages[position] = min(average, norm)
            else:
                memory.averages[position] = self.beta * average + (1.0 - self.beta) * norm
        memory.num_updates += 1

    def state_dict(self) -> dict[str, Any]:
        """Give the averages by position, and how many updates were seen."""
        return dataclasses.asdict(self._memory)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the averages of an earlier run."""
        self._memory.num_updates = state["num_updates"]
        self._memory.averages = {int(place): norm for place, norm in state["averages"].items()}
