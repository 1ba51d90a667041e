"""The next update: what clip rule and optimizer make of a gradient, on twins of the weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..clip.norm import ByGlobalNorm
from ..clip.rule import Attempt, Rule
from ..gradients import Gradients
from ..stepping import check_optimizer, lr_of, step

__all__ = ["NextUpdate"]


class NextUpdate:
    """Makes the update that would come next, as often as asked, and leaves no trace of it.

    The optimizer is copied with all it remembers; its copy steps copies of the weights.

    Args:
        optimizer: Never stepped itself.
        clip: Never asked itself; None does not clip.
        parameters: Those that have a gradient.

    Raises:
        TypeError: It wants a closure.
        ValueError: The optimizer steps none of these parameters.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, clip: Rule | None, parameters: Sequence[Tensor]
    ) -> None:
        check_optimizer(optimizer)
        self._optimizer = optimizer
        self._clip = ByGlobalNorm(float("inf")) if clip is None else clip
        self._parameters = list(parameters)
        self._stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(p) in self._stepped for p in parameters):
            raise ValueError(
                f"`verify(optimizer={type(optimizer).__name__})`: it steps none of this model's "
                "parameters, so there is no update to compare. Make it of `model.parameters()`."
            )
        self.name = type(optimizer).__name__
        if clip is not None:
            self.name += f" after {clip!r}"

    def weights_after(self, gradient: Sequence[Tensor]) -> list[Tensor]:
        """Give every parameter as it would be after one update with this gradient.

        Args:
            gradient: One for each parameter.
        """
        twins = {id(p): nn.Parameter(p.detach().clone()) for p in self._parameters}
        # Parameters the model does not have are left alone: they get no gradient here.
        others = {
            id(p): nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
            for group in self._optimizer.param_groups
            for p in group["params"]
            if id(p) not in twins
        }
        memo: dict[int, Any] = {**twins, **others}
        optimizer = copy.deepcopy(self._optimizer, memo)
        _widen(optimizer)
        clip = copy.deepcopy(self._clip)
        for parameter, grad in zip(self._parameters, gradient, strict=True):
            # Without one stays without: a gradient of zeros would be decayed.
            if id(parameter) in self._stepped and bool(grad.any()):
                twins[id(parameter)].grad = grad.clone()
        gradients = Gradients([p for group in optimizer.param_groups for p in group["params"]])
        lr = lr_of(optimizer)
        decision = clip.decide(gradients, Attempt(0, lr=lr[0] if lr else 0.0))
        if not decision.skip:
            step(optimizer, gradients)
        return [twins[id(p)].detach() for p in self._parameters]


def _widen(optimizer: torch.optim.Optimizer) -> None:
    """Give what the optimizer remembers of a parameter the dtype that the parameter has now."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if (
                isinstance(value, Tensor)
                and value.shape == parameter.shape
                and value.is_floating_point()
                and key != "step"
                and value.dtype != parameter.dtype
            ):
                state[key] = value.to(parameter.dtype)
