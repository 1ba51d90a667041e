"""Measuring: everything a window's end must know, in one read and at most one small collective."""

from __future__ import annotations

import math
from typing import Any

import torch

from .blame import no_gradient_error
from .clip.rule import Rule, needs_each
from .gradients import Gradients, Norms, SharedGradients, values_of
from .ranks import Ranks
from .stepping import parameters_of
from .window import Window

__all__ = ["agree", "bring_", "gathered", "is_finite_here"]


def gathered(
    window: Window[Any], optimizer: torch.optim.Optimizer, ranks: Ranks | None
) -> Gradients:
    """Take the gradients of a window as its backwards left them; their factor is still to come.

    On several ranks this is where they are added up, where a rank without a last microbatch has yet
    to take part. Nothing is read.

    Args:
        window: Whose backwards are done.
        optimizer: What it steps.
        ranks: The other ranks; None for one alone.

    Raises:
        WindowError: No parameter got a gradient.
    """
    parameters = parameters_of(optimizer)
    if ranks is None:
        gradients = Gradients(parameters)
        if not gradients.tensors and any(window.denominators.values()):
            raise no_gradient_error()
        return gradients
    ranks.parallel.finish()
    shared = SharedGradients(parameters, ranks.sharing)
    own = [ranks.sharing.own_factor(p) for p in shared.parameters]
    if not window.tally.is_agreed and any(factor != 1.0 for factor in own):
        shared.mul_each_(own)
        shared.apply_()
    return shared


def agree(
    window: Window[Any],
    gradients: Gradients,
    rule: Rule,
    ranks: Ranks | None,
    *,
    each: bool = False,
) -> None:
    """Have all ranks know norm, loss sums and streamed counts, in one small collective.

    Args:
        window: Whose gradients were gathered.
        gradients: These.
        rule: Asks for the norm.
        ranks: The other ranks; None for one alone, which knows all it needs.
        each: Whether anyone beside the rule asks for the norm of each gradient.

    Raises:
        CountMismatch: A loss carried another count than its window found.
    """
    tally = window.tally
    tally.check_unread()
    if not isinstance(gradients, SharedGradients) or ranks is None:
        return
    if tally.is_agreed:  # `gradients_()` came before
        return
    terms = sorted(tally.denominators) or ["loss"]
    ride = [tally.loss_sum(term) for term in terms]
    is_streamed = tally.counts is None
    if is_streamed:
        ride.append(tally.denominators.get("loss", 0))
    ride.append(window.index + 1)
    claims = ranks.parallel.claims()
    each = each or needs_each(rule)
    sums = gradients.measure(rule.p, each=each, ride=[*ride, *claims])
    ranks.parallel.settle(sums[len(ride) :])
    sums = [total / ranks.copies for total in sums[: len(ride)]]
    tally.num_in_all = round(sums.pop())
    denominators = {"loss": sums.pop()} if is_streamed else {}
    tally.agree(denominators, dict(zip(terms, sums, strict=True)))
    if not math.isfinite(gradients.norm(rule.p)):
        ranks.parallel.forget_calls()


def bring_(
    window: Window[Any], optimizer: torch.optim.Optimizer, rule: Rule, ranks: Ranks | None
) -> None:
    """Bring the true gradients of a window into every `.grad`, before its step."""
    gradients = gathered(window, optimizer, ranks)
    agree(window, gradients, rule, ranks)
    if any(window.denominators.values()):
        gradients.mul_(float(window.unit))
        gradients.apply_()


def is_finite_here(optimizer: torch.optim.Optimizer, ranks: Ranks | None) -> bool:
    """Whether every gradient that lies on this rank is finite. One read, no collective."""
    parameters = parameters_of(optimizer)
    if ranks is None:
        return Gradients(parameters).is_finite_here()
    parts = [values_of(part) for part in ranks.parts_here(parameters)]
    return math.isfinite(Norms(parts).total())
