"""The held-out loss: how well a model does on what it was not trained on, and no trace of asking.

    loss_mean = sum over held-out batches of loss_sum / sum over them of their count

Dropout is off and BatchNorm uses its running statistics while it is measured; mode, random streams
and loader come back as they were, so a run is the same however often it is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RecipeError
from ..losses import LossSum
from ..precision import Precision, autocast_of
from ..snapshot import RandomState, generators
from ..terms import checked_count, terms_of
from .recipe import Recipe
from .spread import Spread

__all__ = ["HeldOut", "measure"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One measurement, after so many applied updates.

    Attributes:
        step: Applied updates before it.
        update: Attempted updates before it.
        loss_mean: The sum of the means of all terms.
        loss_means: The mean of each loss term.
        denominators: What each term's mean is over.
        seconds: How long it took.

    Example:
        >>> held_out = HeldOut(step=10, update=11, loss_mean=2.5, loss_means={"loss": 2.5},
        ...                    denominators={"loss": 100}, seconds=0.5)
        >>> HeldOut.from_json(held_out.to_json()) == held_out
        True
    """

    step: int
    update: int
    loss_mean: float
    loss_means: Mapping[str, float]
    denominators: Mapping[str, float]
    seconds: float

    def to_json(self) -> str:
        """Give it as one line of strict JSON; inf and nan are spelt as in update records."""
        values = dataclasses.asdict(self)
        values["loss_mean"] = _spelt(self.loss_mean)
        values["loss_means"] = {term: _spelt(mean) for term, mean in self.loss_means.items()}
        return json.dumps(values, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> HeldOut:
        """Read one line of `held_out.jsonl`."""
        values = json.loads(line)
        values["loss_mean"] = float(values["loss_mean"])
        values["loss_means"] = {k: float(mean) for k, mean in values["loss_means"].items()}
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})


def measure(
    recipe: Recipe,
    *,
    precision: Precision,
    step: int,
    update: int,
    should_stop: Callable[[], bool] = lambda: False,
    spread: Spread | None = None,
) -> HeldOut | None:
    """Measure the held-out loss. Costs one forward of every held-out batch.

    Ranks take turns, batch by batch, and one small gather brings their sums together.

    Args:
        recipe: Its model is measured as it is now.
        precision: What the forward runs in; that of the training.
        step: Applied updates so far, for the record.
        update: Attempted updates so far, for the record.
        should_stop: Asked before each batch; on several ranks it must say the same on all.
        spread: Over which ranks; None for one process.

    Returns:
        None when it was stopped.

    Raises:
        RecipeError: There are no held-out batches, or they hold nothing to take the mean over.
    """
    started = time.perf_counter()
    spread = spread or Spread()
    sums: dict[str, float] = {}
    denominators: dict[str, float] = {}
    autocast = autocast_of(precision, list(recipe.model.parameters()))
    with (
        _leaving_no_trace(recipe.model, recipe.held_out),
        spread.buffers_alike(recipe.model),
        torch.no_grad(),
    ):
        for batch, is_own in spread.rounds(recipe.held_out or ()):
            if should_stop():
                return None
            with contextlib.nullcontext() if autocast is None else autocast():
                loss = recipe.loss(recipe.model, batch)
            if not is_own:  # run with the others, where a forward needs all of them
                continue
            counts = None if recipe.count is None else terms_of(recipe.count(batch))
            for term, (loss_sum, count) in _by_term(loss, counts).items():
                denominators[term] = denominators.get(term, 0) + count
                if count:  # a mean over nothing may have given nan
                    sums[term] = sums.get(term, 0.0) + loss_sum
    sums, denominators = spread.added_up(sums), spread.added_up(denominators)
    means = {term: total / denominators[term] for term, total in sums.items()}
    if not means:
        raise RecipeError(
            "`Recipe.held_out` gave nothing to take a mean over, so there is no held-out loss. "
            "Give batches that hold targets and can be iterated again, or None."
        )
    return HeldOut(
        step=step,
        update=update,
        loss_mean=sum(means.values()),
        loss_means=means,
        denominators=denominators,
        seconds=time.perf_counter() - started,
    )


def _by_term(loss: Any, counts: Mapping[str, float] | None) -> dict[str, tuple[float, float]]:
    """Pair the loss sum of each term with its count; training has checked that they agree."""
    losses = loss if isinstance(loss, Mapping) else {_only(counts): loss}
    return {
        term: _sum_and_count(value, None if counts is None else counts.get(term, 0))
        for term, value in losses.items()
    }


def _only(counts: Mapping[str, float] | None) -> str:
    return "loss" if not counts else next(iter(counts))


def _sum_and_count(loss: Tensor | LossSum, count: float | None) -> tuple[float, float]:
    if isinstance(loss, LossSum):
        return loss.sum.item(), checked_count(loss.count, "loss") if count is None else count
    if count is None:
        raise RecipeError(
            "A loss without a count: nothing says what its mean is over. Return a `LossSum`, or "
            "give the recipe a `count`."
        )
    return loss.item(), count


@contextlib.contextmanager
def _leaving_no_trace(model: nn.Module, loader: object) -> Iterator[None]:
    random = RandomState.capture()
    orders = [(generator, generator.get_state()) for generator in generators(loader)]
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])  # a model may do more here than set flags
        for module, was_training in modes:
            module.training = was_training
        for generator, state in orders:
            generator.set_state(state)
        random.restore()


def _spelt(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
