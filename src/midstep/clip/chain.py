"""Several rules, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from ..gradients import Gradients
from .rule import Attempt, Decision, Rule, needs_each

__all__ = ["Chain"]


class Chain:
    """Apply several rules in order, each to what the one before left.

        g <- rule_n(... rule_2(rule_1(g)))

    Rules that only multiply are folded into one factor and cost no further pass. The record shows
    the norm before the first rule, and the product of the coefficients.

    Args:
        *rules: At least one.

    Raises:
        ValueError: No rule is given.

    Example:
        >>> import torch
        >>> from midstep.clip import ByGlobalNorm, ByValue
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> gradients = Gradients([weight])
        >>> _ = Chain(ByValue(1.0), ByGlobalNorm(1.0)).decide(gradients, Attempt(step=0))
        >>> gradients.apply_(); weight.grad
        tensor([0.7071, 0.7071])
    """

    __slots__ = ("rules",)

    def __init__(self, *rules: Rule) -> None:
        if not rules:
            raise ValueError("`Chain()` without a rule clips nothing; pass `clip=None` instead.")
        self.rules = rules

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.rules))})"

    @property
    def needs_each(self) -> bool:
        """Whether any of the rules does."""
        return any(needs_each(rule) for rule in self.rules)

    @property
    def p(self) -> float:
        """The order of the first rule's norm."""
        return self.rules[0].p

    def decide(self, gradients: Gradients, attempt: Attempt) -> Decision:
        """Let each rule decide on what is left; the first that wants the window skipped ends it."""
        decisions: list[Decision] = []
        coefficient: float | None = 1.0
        for rule in self.rules:
            decision = rule.decide(gradients, attempt)
            decisions.append(decision)
            known = coefficient is not None and decision.coefficient is not None
            coefficient = coefficient * decision.coefficient if known else None  # type: ignore[operator]
            if decision.skip:
                break
        return Decision(
            clipped=any(d.clipped for d in decisions),
            coefficient=coefficient,
            skip=decisions[-1].skip,
            threshold=decisions[0].threshold,
            seen=decisions,
        )

    def commit(self, decision: Decision) -> None:
        """Have each rule remember its own part."""
        for rule, own in zip(self.rules, decision.seen, strict=True):
            rule.commit(own)

    def state_dict(self) -> dict[str, Any]:
        """Give what each rule remembers, by position."""
        return {str(index): rule.state_dict() for index, rule in enumerate(self.rules)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have each rule take its own part.

        Raises:
            CheckpointError: It is of a chain of another length.
        """
        if len(state) != len(self.rules):
            raise CheckpointError(
                f"`{self!r}` has {len(self.rules)} rules and the saved chain had {len(state)}, so "
                "what each remembers would go to another. Make the chain as it was then."
            )
        for index, rule in enumerate(self.rules):
            rule.load_state_dict(state[str(index)])
