"""Clipping by norm: of all gradients together, of each parameter group, or of each tensor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from torch import Tensor

from ..gradients import Gradients, combined_norm
from .rule import Attempt, Decision, Stateless, Threshold, at_step, check_threshold, shrink

__all__ = ["ByGlobalNorm", "ByGroupNorm", "ByTensorNorm"]


@dataclasses.dataclass(frozen=True, slots=True)
class ByGlobalNorm(Stateless):
    r"""Shrink all gradients by one factor, so that their joint norm is at most `max_norm`.

        g <- g * min(1, max_norm / ||g||_p)

    One factor for every parameter keeps the direction. A plain step of SGD is then at most
    lr * max_norm long; a step of Adam is not. The factor is folded into the optimizer's own pass where
    it takes one. Parameters without a gradient do not count; tied ones count once.

    Attributes:
        max_norm: In units of the gradient of the mean loss; a number, or a function of the number of
            applied updates. `math.inf` only measures.
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
        _check_order(self.p, "ByGlobalNorm")

    def decide(self, gradients: Gradients, attempt: Attempt) -> Decision:
        """Shrink all gradients when their norm is greater than `max_norm`."""
        max_norm = at_step("max_norm", self.max_norm, attempt.step, "ByGlobalNorm")
        coefficient = shrink(gradients.norm(self.p), max_norm)
        if coefficient != 1.0:
            gradients.mul_(coefficient)
        return Decision(clipped=coefficient != 1.0, coefficient=coefficient, threshold=max_norm)


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

    max_norm: Threshold
    p: float = 2.0

    def __post_init__(self) -> None:
        check_threshold("max_norm", self.max_norm, "ByTensorNorm")
        _check_order(self.p, "ByTensorNorm")

    def decide(self, gradients: Gradients, attempt: Attempt) -> Decision:
        """Shrink each gradient whose norm is greater than `max_norm`."""
        max_norm = at_step("max_norm", self.max_norm, attempt.step, "ByTensorNorm")
        norms = gradients.norms(self.p)
        return _shrink_each(gradients, norms, [shrink(n, max_norm) for n in norms], max_norm)


class ByGroupNorm(Stateless):
    r"""Clip groups of parameters apart, each by the joint norm of its own gradients.

        g_i <- g_i * min(1, max_norm_k / ||g of group k||_p)   for i in group k

    For models whose parts live on different scales (a pretrained trunk and a new head, say). A gradient
    in no group is left as it is.

    Args:
        groups: Pairs of parameters and their `max_norm`, which may be a function of the number of
            applied updates. Parameters, or anything that lists them, such as
            `model.head.parameters()`.
        p: Order of the norm, greater than 0.

    Raises:
        ValueError: A threshold is not greater than 0, a group is empty, or a parameter is in two.

    Example:
        >>> import torch
        >>> a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        >>> a.grad, b.grad = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])
        >>> gradients = Gradients([a, b])
        >>> _ = ByGroupNorm([([a], 1.0), ([b], 10.0)]).decide(gradients, Attempt(step=0))
        >>> gradients.apply_(); a.grad, b.grad
        (tensor([0.6000, 0.8000]), tensor([3., 4.]))
    """

    __slots__ = ("_group_of", "_max_norms", "p")

    def __init__(
        self, groups: Iterable[tuple[Iterable[Tensor], Threshold]], *, p: float = 2.0
    ) -> None:
        _check_order(p, "ByGroupNorm")
        self.p = p
        self._max_norms: list[Threshold] = []
        self._group_of: dict[Tensor, int] = {}
        for index, (parameters, max_norm) in enumerate(groups):
            check_threshold("max_norm", max_norm, "ByGroupNorm")
            self._max_norms.append(max_norm)
            before = len(self._group_of)
            for parameter in dict.fromkeys(parameters):
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
        return _shrink_each(gradients, norms, [factors[group] for group in groups], None)


def _shrink_each(
    gradients: Gradients, norms: list[float], factors: list[float], threshold: float | None
) -> Decision:
    if all(factor == 1.0 for factor in factors):
        return Decision(clipped=False, threshold=threshold)
    before = combined_norm(norms, 2.0)
    after = combined_norm([n * c for n, c in zip(norms, factors, strict=True)], 2.0)
    gradients.mul_each_(factors)
    return Decision(clipped=True, coefficient=after / before, threshold=threshold)


def _check_order(p: float, rule: str) -> None:
    if not p > 0:  # written so that nan fails too
        raise ValueError(
            f"`{rule}(p={p!r})`: the order of a norm must be greater than 0; 2 is the length of the "
            f"gradient, {math.inf} its largest entry."
        )
