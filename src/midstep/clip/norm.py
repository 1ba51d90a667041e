"""Clipping by norm: of all gradients together, of each parameter group, or of each tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from ..gradients import Gradients, combined_norm
from .rule import (
    Attempt,
    Decision,
    Stateless,
    Threshold,
    at_step,
    check_order,
    check_threshold,
    shrink,
    shrink_all,
    shrink_each,
)

__all__ = ["ByGlobalNorm", "ByGroupNorm", "ByTensorNorm"]


@dataclasses.dataclass(frozen=True, slots=True)
class ByGlobalNorm(Stateless):
    r"""Shrink all gradients by one factor, so that their joint norm is at most `max_norm`.

        g <- g * min(1, max_norm / ||g||_p)

    One factor for every parameter keeps the direction. A plain step of SGD is then at most
    lr * max_norm long; a step of Adam is not. The factor is folded into the optimizer's own pass
    where it takes one. Parameters without a gradient do not count; tied ones count once.

    Attributes:
        max_norm: In units of the gradient of the mean loss; a number, or a function of the number
            of applied updates. `math.inf` only measures.
        p: Order of the norm, greater than 0; 2 costs one read of the gradients, `math.inf` one,
            others two in float64.

    Raises:
        ValueError: `max_norm` or `p` is not greater than 0.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> gradients = Gradients([weight])
        >>> ByGlobalNorm(1.0).decide(gradients, Attempt(step=0)).coefficient
        0.2
        >>> gradients.apply_(); weight.grad
        tensor([0.6000, 0.8000])

    Reference: Pascanu, Mikolov & Bengio 2013, arXiv:1211.5063, algorithm 1.
    """

    max_norm: Threshold
    p: float = 2.0

    def __post_init__(self) -> None:
        check_threshold("max_norm", self.max_norm, "ByGlobalNorm")
        check_order(self.p, "ByGlobalNorm")

    def decide(self, gradients: Gradients, attempt: Attempt) -> Decision:
        """Shrink all gradients when their norm is greater than `max_norm`."""
        max_norm = at_step("max_norm", self.max_norm, attempt.step, "ByGlobalNorm")
        return shrink_all(gradients, max_norm, p=self.p)

    def decide_unread(self, norm: Tensor, step: int) -> tuple[Tensor, float]:
        """Decide on a norm that stays on its device: no host sync.

        Args:
            norm: Of all gradients. Shape [].
            step: Applied updates so far.

        Returns:
            What to multiply by, and `max_norm` at this step.
        """
        max_norm = at_step("max_norm", self.max_norm, step, "ByGlobalNorm")
        return torch.where(norm > max_norm, max_norm / norm, 1.0), max_norm


@dataclasses.dataclass(frozen=True, slots=True)
class ByTensorNorm(Stateless):
    r"""Shrink each gradient tensor by its own factor, so that its norm is at most `max_norm`.

        g_i <- g_i * min(1, max_norm / ||g_i||_p)

    Changes the direction of the whole gradient: large tensors are turned down, small ones are not.

    Attributes:
        max_norm: Of one tensor; a number, or a function of the number of applied updates.
        p: Order of the norm, greater than 0.

    Raises:
        ValueError: `max_norm` or `p` is not greater than 0.

    Example:
        >>> import torch
        >>> a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        >>> a.grad, b.grad = torch.tensor([3.0, 4.0]), torch.tensor([0.3, 0.4])
        >>> gradients = Gradients([a, b])
        >>> _ = ByTensorNorm(1.0).decide(gradients, Attempt(step=0))
        >>> gradients.apply_(); a.grad, b.grad
        (tensor([0.6000, 0.8000]), tensor([0.3000, 0.4000]))
    """

    needs_each: ClassVar[bool] = True

    max_norm: Threshold
    p: float = 2.0

    def __post_init__(self) -> None:
        check_threshold("max_norm", self.max_norm, "ByTensorNorm")
        check_order(self.p, "ByTensorNorm")

    def decide(self, gradients: Gradients, attempt: Attempt) -> Decision:
        """Shrink each gradient whose norm is greater than `max_norm`."""
        max_norm = at_step("max_norm", self.max_norm, attempt.step, "ByTensorNorm")
        factors = [shrink(norm, max_norm) for norm in gradients.norms(self.p)]
        return shrink_each(gradients, factors, p=self.p, threshold=max_norm)


class ByGroupNorm(Stateless):
    r"""Clip groups of parameters apart, each by the joint norm of its own gradients.

        g_i <- g_i * min(1, max_norm_k / ||g of group k||_p)   for i in group k

    For models whose parts live on different scales (a pretrained trunk and a new head, say). A
    gradient in no group is left as it is.

    Args:
        groups: Pairs of parameters and their `max_norm`, which may be a function of the number of
            applied updates. A parameter, or anything that lists some, such as
            `model.head.parameters()`.
        p: Order of the norm, greater than 0.

    Raises:
        ValueError: A threshold is not greater than 0, there is no group, one is empty, or a
            parameter is in two.

    Example:
        >>> import torch
        >>> a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        >>> a.grad, b.grad = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])
        >>> gradients = Gradients([a, b])
        >>> _ = ByGroupNorm([([a], 1.0), ([b], 10.0)]).decide(gradients, Attempt(step=0))
        >>> gradients.apply_(); a.grad, b.grad
        (tensor([0.6000, 0.8000]), tensor([3., 4.]))
    """

    needs_each = True
    __slots__ = ("_group_of", "_max_norms", "p")

    def __init__(
        self, groups: Iterable[tuple[Tensor | Iterable[Tensor], Threshold]], *, p: float = 2.0
    ) -> None:
        check_order(p, "ByGroupNorm")
        self.p = p
        self._max_norms: list[Threshold] = []
        self._group_of: dict[Tensor, int] = {}
        for index, (parameters, max_norm) in enumerate(groups):
            check_threshold("max_norm", max_norm, "ByGroupNorm")
            self._max_norms.append(max_norm)
            before = len(self._group_of)
            for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
                if self._group_of.setdefault(parameter, index) != index:
                    raise ValueError(
                        f"`ByGroupNorm`: a parameter of shape {list(parameter.shape)} is in groups "
                        f"{self._group_of[parameter]} and {index}, so it would be clipped twice. "
                        "Leave it in one."
                    )
            if len(self._group_of) == before:
                raise ValueError(
                    f"`ByGroupNorm`: group {index} lists no parameter. A generator such as "
                    "`model.parameters()` is empty once it was read; pass a fresh one or a list."
                )
        if not self._max_norms:
            raise ValueError(
                "`ByGroupNorm` got no group, so nothing would be clipped. A generator is empty "
                "once it was read; pass a list of pairs, or `clip=None`."
            )

    def __repr__(self) -> str:
        return f"ByGroupNorm(max_norms={self._max_norms}, p={self.p})"

    def decide(self, gradients: Gradients, attempt: Attempt) -> Decision:
        """Shrink each group whose norm is greater than its `max_norm`."""
        norms = gradients.norms(self.p)
        groups = [self._group_of.get(parameter) for parameter in gradients.parameters]
        factors: dict[int | None, float] = {None: 1.0}
        for index, threshold in enumerate(self._max_norms):
            max_norm = at_step("max_norm", threshold, attempt.step, "ByGroupNorm")
            own = [n for n, group in zip(norms, groups, strict=True) if group == index]
            factors[index] = shrink(combined_norm(own, self.p), max_norm)
        return shrink_each(gradients, [factors[group] for group in groups], p=self.p)
