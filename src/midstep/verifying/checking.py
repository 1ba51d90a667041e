"""`verify`: is what the pieces of a batch add up to the gradient of the batch at once?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..clip.rule import Rule
from ..cutting import Count
from ..window import Loss
from .borrowing import borrowed
from .certificate import Certificate, Comparison, Outcome, Reason
from .diagnosis import reasons_of
from .examination import Accumulated, Examination
from .numbers import count_reason
from .subject import Subject, norm
from .updates import NextUpdate

__all__ = ["verify"]

_FEWEST_ROWS = 3  # two cannot be cut unevenly, so a mean of means could not be told apart


def verify(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Loss | Mapping[str, Loss]],
    *,
    count: Count | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    clip: Rule | None = None,
) -> Certificate:
    r"""Find out whether pieces of a batch add up to the gradient of the batch at once, or why not.

        sum over pieces of grad(loss_sum) / sum of counts  =  grad(loss_sum of all) / count of all

    for halves, quarters, single rows, uneven and permuted pieces; and whether the next update of
    the optimizer, after clipping, is the same. Equal means that each parameter is within a bound of
    its own, which is derived and not chosen:

        bound = 2 W + k u sum ||g_piece||,    W = max over 3 draws of ||g_moved - g||

    `g_moved` is the gradient of the whole batch when each input of each operation, forward and
    backward, is moved up or down by as much as 6 sqrt(n) u of itself: what n roundings of unit u
    amount to but for a chance of 3e-8. k is the number of pieces. u is 1.1e-16 in float64, in which
    all of this runs where the model can; a part that computes in float32 gets the u of float32.

    Where they are not equal, experiments look for the reason: the same draws for the same rows,
    state put back, the numbers by which the loss differs from a sum, layers whose rows move when
    other rows are replaced, the operation at which rows meet. And in every run faults are planted
    (a wrong divisor, a mean of means, a row left out): a check that does not tell these apart
    gives no certificate.

    The model is computed as it is, in training or evaluation mode. Afterwards weights, buffers,
    gradients, modes, random state, optimizer and clip rule are what they were, to the last bit,
    also after an error; of attributes that a forward changes, those of modules are put back.
    Costs about 5 + 5 forwards and backwards of the batch, one of each row, and the memory of
    weights and gradients about eight times.

    Args:
        model: The model. DDP and compiled models are looked through.
        batch: At least 3 rows; what cuts along rows (see `Updater.windows(rows=...)`).
        loss: `loss(model, microbatch)` gives the loss sum: a tensor, a `LossSum`, or one of these
            per term.
        count: What the mean is over; may be left out where the losses are `LossSum`.
        optimizer: Whose next update is compared; it is not stepped.
        clip: Bounds the gradient before that update.

    Returns:
        The certificate: print it, or ask it (`equal`, `reasons`, `to_json()`).

    Raises:
        ValueError: Fewer than 3 rows, a clip rule without an optimizer, or an optimizer of other
            parameters.
        NothingToCompare: Nothing is counted, or the gradient is zero or not finite.
        TypeError: The loss is not what a window takes.

    Example:
        >>> import midstep as ms
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        >>> certificate = ms.verify(
        ...     model, torch.randn(12, 4), lambda m, x: m(x).pow(3).sum(), count=ms.rows()
        ... )
        >>> certificate.equal, certificate.reasons[0].kind.value, certificate.reasons[0].names
        (False, 'layers', ('1',))

    Reference: Higham 2002, "Accuracy and stability of numerical algorithms", sections 3.1 and 8.8;
    Higham & Mary 2019, "A new approach to probabilistic rounding error analysis", SISC 41(5).
    """
    if clip is not None and optimizer is None:
        raise ValueError(
            "`verify(clip=...)` without `optimizer=`: a clip rule acts on an update, and none is "
            "made. Pass the optimizer, too."
        )
    model = _unwrapped(model)
    try:
        return _verified(model, batch, loss, count, optimizer, clip, double=True)
    except _NotInDouble as refusal:
        found = _verified(model, batch, loss, count, optimizer, clip, double=False)
        note = f"Not computed in float64, where the batch does not run: {refusal}"
        return dataclasses.replace(found, notes=(*found.notes, note))


class _NotInDouble(Exception):
    """The whole batch does not run in float64."""


def _verified(  # noqa: PLR0917 - hands on what it was given
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Any],
    count: Count | None,
    optimizer: torch.optim.Optimizer | None,
    clip: Rule | None,
    *,
    double: bool,
) -> Certificate:
    with borrowed(model, double=double) as lent:
        subject = Subject(lent, batch, loss, count, called=model, double=double)
        _check(subject)
        if double:
            _try(subject)
        update = None if optimizer is None else NextUpdate(optimizer, clip, lent.parameters)
        return _certificate(Examination(subject, update), model)


def _try(subject: Subject) -> None:
    """See whether the whole runs in float64 where its own precision is another."""
    try:
        subject.lent.rewind()
        subject.forward(range(subject.num_rows))
    except Exception as error:
        raise _NotInDouble(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def _check(subject: Subject) -> None:
    if subject.num_rows < _FEWEST_ROWS:
        raise ValueError(
            f"`verify(batch=...)` has {subject.num_rows} rows: at least {_FEWEST_ROWS} are needed, "
            "because fewer cannot be cut unevenly, and then a mean of means would pass."
        )
    if not subject.lent.parameters:
        raise ValueError(
            f"`verify(model={type(subject.lent.model).__name__})`: no parameter wants a gradient, "
            "so there is none to compare."
        )


def _certificate(examination: Examination, model: nn.Module) -> Certificate:
    compared: list[Comparison] = []
    results: dict[str, Accumulated] = {}
    for cut in examination.cuts:
        comparison, found = examination.compare(cut)
        compared.append(comparison)
        if found is not None:
            results[cut.name] = found
    controls = examination.controls(results) if {"uneven", "ones"} <= results.keys() else []
    mismatch = count_reason(results)
    reasons: list[Reason] = [] if mismatch is None else [mismatch]
    notes: list[str] = []
    is_repeatable = examination.repeats and examination.update_repeats
    if not is_repeatable or not all(c.equal for c in compared):
        found_out = reasons_of(examination, compared, results)
        # A count that does not match explains what numbers it leads to.
        reasons += [r for r in found_out.reasons if mismatch is None or r.kind is not mismatch.kind]
        notes += found_out.notes
    elif not reasons and examination.changed:
        names = ", ".join(f"`{name}`" for name in examination.changed[:4])
        notes.append(f"A forward changes {names}; the gradient does not depend on how often.")
    outcome = Outcome.NOT_EQUAL if reasons else Outcome.EQUAL
    if not reasons and not all(control.told_apart for control in controls):
        outcome = Outcome.NO_CERTIFICATE
    dtypes = {p.dtype for p in examination.subject.lent.parameters}
    return Certificate(
        outcome=outcome,
        summary=_summary(outcome, compared, len(reasons)),
        model=type(model).__name__,
        training=model.training,
        num_rows=examination.subject.num_rows,
        num_parameters=sum(p.numel() for p in examination.subject.lent.parameters),
        dtype=", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
        gradient_norm=norm(examination.full),
        bound=2 * math.hypot(*examination.wander) / norm(examination.full),
        comparisons=tuple(compared),
        controls=tuple(controls),
        reasons=tuple(reasons),
        notes=tuple(notes),
        update="" if examination.update is None else examination.update.name,
    )


def _summary(outcome: Outcome, compared: list[Comparison], num_reasons: int) -> str:
    ran = [c for c in compared if not c.failed]
    gap = max((c.gap for c in ran), default=0.0)
    if outcome is Outcome.EQUAL:
        worst = max(c.worst for c in ran)
        return (
            f"in {len(ran)} cuts the accumulated gradient is that of the whole batch, to {gap:.1e} "
            f"of its length and {worst:.2g} of the rounding bound."
        )
    if outcome is Outcome.NO_CERTIFICATE:
        return "nothing was found, but the planted faults were not all told apart either."
    reasons = "reason" if num_reasons == 1 else "reasons"
    return f"the accumulated gradient is off by up to {gap:.1%}; {num_reasons} {reasons} below."


def _unwrapped(model: nn.Module) -> nn.Module:
    """Look through what compiles or communicates: neither changes what is computed."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
