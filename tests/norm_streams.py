"""Streams of gradients for rules that remember."""

from collections.abc import Iterable

import torch
from clipping import with_gradient
from torch import nn

from midstep.clip import Attempt, Decision, Rule
from midstep.gradients import Gradients


def of_norm(norm: float) -> nn.Parameter:
    return with_gradient(torch.tensor([norm], dtype=torch.float64))


def run(rule: Rule, norms: Iterable[float], *, step: int = 0) -> list[Decision]:
    """Hold a stream of gradient norms against a rule; all are applied but those it skips."""
    decisions = []
    for norm in norms:
        decision = rule.decide(Gradients([of_norm(norm)]), Attempt(step=step))
        if not decision.skip:
            rule.commit(decision)
        decisions.append(decision)
    return decisions


def clipped_norms(rule: Rule, norms: Iterable[float]) -> list[float]:
    found = []
    for norm in norms:
        parameter = of_norm(norm)
        gradients = Gradients([parameter])
        decision = rule.decide(gradients, Attempt(step=0))
        gradients.apply_()
        rule.commit(decision)
        assert parameter.grad is not None
        found.append(parameter.grad.item())
    return found


def level_shift() -> list[float]:
    """Forty norms about 1, then two hundred about 2."""
    return [1.0 + (-0.1, 0.1)[i % 2] for i in range(40)] + [
        2.0 + (-0.2, 0.2)[i % 2] for i in range(200)
    ]
