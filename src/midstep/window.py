"""Windows: the microbatches of one update, and the numbers their losses are divided by.

    gradient = sum over ranks and microbatches of grad(loss_sum) / denominator

The window owns the denominator. Known ahead (*counted*), it goes into the backward as its seed, and
`.grad` holds the true gradient at once. Counted as it goes (*streamed*), the seed carries a
provisional power of two, so that sums stay at a sane magnitude, and what remains of the division is
one exact factor at the step. The loss that is logged is never divided before it is a mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .accumulation.stage import Accumulation
from .cutting import Cut, Elastic
from .errors import WindowError
from .forward import Forward
from .ranks import Ranks
from .records import UpdateRecord
from .seeds import Seeds, run_backward
from .tally import Loss, Tally

__all__ = ["Driver", "Loss", "Window"]

Batch = TypeVar("Batch")


@dataclasses.dataclass(frozen=True, slots=True)
class Driver:
    """What a window needs of the updater that made it.

    Attributes:
        step: Ends the window.
        gradients: Brings the true gradients into `.grad`.
        drop: Ends the window without a step, gradients cleared.
        autocast: Opens the autocast of one forward; None where there is none.
        look: Whether every gradient is finite so far, asked after each backward; None for no look.
        ranks: The other ranks; None for one alone.
        is_lazy: Whether losses, and counts that they carry, are read one update later.
        accumulation: How gradients are added up; None for autograd's own way.
        on_batch: Told the position of each microbatch that is handed out; None for nobody.
        before_backward: Told the position of a microbatch whose forward is done.
        after_backward: Told it once its backward is done, too.
        take_step: Steps the optimizer; None for its own way.
    """

    step: Callable[[Window[Any]], UpdateRecord]
    gradients: Callable[[Window[Any]], None]
    drop: Callable[[Window[Any]], None]
    autocast: Callable[[], AbstractContextManager[Any]] | None = None
    look: Callable[[], bool] | None = None
    ranks: Ranks | None = None
    is_lazy: bool = False
    accumulation: Accumulation | None = None
    on_batch: Callable[[int], None] | None = None
    before_backward: Callable[[int], None] | None = None
    after_backward: Callable[[int], None] | None = None
    take_step: Callable[[torch.optim.Optimizer], None] | None = None

    @property
    def needs_forward(self) -> bool:
        """Whether a forward outside `Window.forward` would lose precision, or talk too often."""
        return self.autocast is not None or self.ranks is not None


class Window(Generic[Batch]):
    """The microbatches of one update. Made by `Updater.windows`; iterate, backward each, step once.

    A window begun and not stepped (an exception, a `break`) is dropped: its gradients are cleared,
    nothing is stepped and no clock ticks.

    Attributes:
        index: Position of the current microbatch, from 0; -1 before the first.
        is_last: Whether the current microbatch is the window's last.
        ended: Whether it was stepped or dropped.
        has_forward: Whether the current microbatch has been in `forward()`.
        tally: Its counts and loss sums.

    Example:
        >>> import midstep as ms
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> for window in updater.windows([torch.ones(3, 2), torch.ones(1, 2)], size=2):
        ...     for x in window:
        ...         window.backward(model(x).sum(), count=len(x))
        ...     record = window.step()
        >>> record.denominators, model.weight.grad
        ({'loss': 4}, tensor([[1., 1.]]))
    """

    __slots__ = (
        "_cut",
        "_driver",
        "_first_bad",
        "_is_settled",
        "_num_backward",
        "_num_in_all",
        "_seeds",
        "ended",
        "has_forward",
        "index",
        "is_last",
        "tally",
    )

    def __init__(
        self,
        cut: Cut[Batch],
        driver: Driver,
        *,
        scale: float | Tensor,
        num_in_all: int | None = None,
        divisor: float | None = None,
    ) -> None:
        self._cut = cut
        self._driver = driver
        self._num_in_all = num_in_all
        self._num_backward = 0
        self._first_bad: int | None = None
        self._is_settled = False
        self.tally = Tally(cut.counts, is_lazy=driver.is_lazy)
        self._seeds = Seeds(
            scale,
            rank_factor=1.0 if driver.ranks is None else driver.ranks.parallel.seed_factor,
            denominators=self.tally.denominators,
            num_expected=cut.size if cut.counts is None else None,
            divisor=divisor,
            is_alone=driver.ranks is None,
        )
        self.index = -1
        self.is_last = False
        self.ended = False
        self.has_forward = False

    def __iter__(self) -> Iterator[Batch]:
        for batch, is_last in self._cut.pull:
            self.index += 1
            self.is_last = is_last
            self.has_forward = False
            if self._driver.on_batch is not None:
                self._driver.on_batch(self.index)
            yield batch

    @property
    def scale(self) -> float | Tensor:
        """What every loss of this window is multiplied by in backward; maybe on the device yet."""
        return self._seeds.scale

    @property
    def denominators(self) -> dict[str, float]:
        """What each term's mean is over: counted, of the whole window; streamed, so far."""
        return self.tally.denominators

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the window: of all ranks, or while these are not known of this one."""
        return self._num_in_all or self.tally.num_in_all or self.index + 1

    @property
    def take_step(self) -> Callable[[torch.optim.Optimizer], None] | None:
        """What steps the optimizer; None for its own way."""
        return self._driver.take_step

    @property
    def elastic(self) -> Elastic[Batch] | None:
        """How it may be cut, time and again; None where it is cut for good."""
        return self._cut.elastic

    @property
    def is_read_as_it_goes(self) -> bool:
        """Whether batches are read between forwards, instead of all before the first."""
        return self._cut.num_known is None

    @property
    def syncs(self) -> bool:
        """Whether the backward of the current microbatch adds up the gradients over the ranks."""
        if not self.is_last or self._num_in_all is None or self._driver.look is not None:
            return False
        counts = self._cut.counts
        return counts is None or any(counts[self.index].values())

    def forward(self) -> AbstractContextManager[None]:
        """Run the forward of the current microbatch in its precision.

        Leaving it out is allowed in float32 on one rank; elsewhere `backward` refuses, because the
        precision that was asked for would be lost without a word.

        Returns:
            A context for the forward and the loss, not for the backward.
        """
        autocast = self._driver.autocast
        return Forward(self, None if autocast is None else autocast(), self._driver.ranks)

    def backward(
        self, loss: Loss | Mapping[str, Loss], *, count: float | Tensor | None = None
    ) -> None:
        """Add the gradient of the current microbatch.

            .grad += grad(loss_sum) * seed,   seed = scale / denominator

        No graph node is added and the loss is not divided. A microbatch that counts nothing is left
        out, so that a mean over nothing (0/0) goes nowhere.

        Args:
            loss: The loss *sum* of this microbatch: a tensor of shape [], a `LossSum`, or one of
                these per term.
            count: What it is a sum over, in a streamed window; a `LossSum` carries its own.

        Raises:
            WindowError: Not a scalar, no graph, no count, a second time for one microbatch, or
                outside `forward()` where that would lose the precision.
            CountMismatch: The loss carries another count than the window found.
        """
        try:
            if self._driver.ranks is None:
                self._run_backward(loss, count)
            else:
                with self._driver.ranks.failing():
                    self._run_backward(loss, count)
        except BaseException:
            self._drop()  # half of a gradient may have arrived
            raise

    def _run_backward(self, loss: Loss | Mapping[str, Loss], count: float | Tensor | None) -> None:
        if self.ended or self._is_settled or self.index < 0:
            raise self._misuse()
        if not self.has_forward and self._driver.needs_forward:
            raise WindowError(
                "`window.backward()` without `with window.forward():` around this microbatch's "
                "forward, so it ran without the autocast or the sync between ranks that was asked "
                "for. Put the forward and the loss inside it."
            )
        if self._driver.before_backward is not None:
            self._driver.before_backward(self.index)
        if type(loss) is not Tensor and isinstance(loss, Mapping):
            self._backward_terms(loss)
        else:
            term = self.tally.only_term()
            loss_sum, found = self.tally.take(term, loss, count, self.index)
            if found:
                self._walk((loss_sum,), (self._seeds.of(term, loss_sum, found),))
            elif self._is_lockstep:
                self._backward_nothing([loss_sum])
        self._num_backward += 1
        if self._driver.after_backward is not None:
            self._driver.after_backward(self.index)
        look = self._driver.look
        if look is not None and self._first_bad is None and not look():
            self._first_bad = self.index

    def _backward_terms(self, losses: Mapping[str, Loss]) -> None:
        self.tally.check_terms(losses)
        live: list[Tensor] = []
        nothing: list[Tensor] = []
        seeds: list[Tensor] = []
        for term, loss in losses.items():
            loss_sum, found = self.tally.take(term, loss, None, self.index)
            if found:
                live.append(loss_sum)
                seeds.append(self._seeds.of(term, loss_sum, found))
            elif self._is_lockstep:
                nothing.append(loss_sum)
        if live:
            self._walk(live, seeds)  # one walk over what the terms share
        elif nothing:
            self._backward_nothing(nothing)

    def _walk(self, losses: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
        accumulation = self._driver.accumulation
        if accumulation is None:
            run_backward(losses, seeds)
        else:
            accumulation.before_backward(index=self.index, syncs=self.syncs)
            try:
                run_backward(losses, seeds)
            finally:
                accumulation.after_backward()
        if self._driver.ranks is not None and self.syncs:
            self._driver.ranks.parallel.after_backward()

    @property
    def _is_lockstep(self) -> bool:
        ranks = self._driver.ranks
        return ranks is not None and ranks.parallel.is_lockstep

    def _backward_nothing(self, losses: list[Tensor]) -> None:
        """Take part in the collectives of a backward without adding anything."""
        if not all(math.isfinite(loss.detach()) for loss in losses):
            raise WindowError(
                f"Microbatch {self.index} counts nothing and its loss is not finite, as a mean "
                "over nothing is. Its backward is a collective that this rank cannot leave out, "
                "and 0 times nan is nan. Return the loss as a sum."
            )
        torch.autograd.backward(losses, [torch.zeros_like(loss) for loss in losses])

    def step(self) -> UpdateRecord:
        """End the window: look, clip, step, tick, and say what happened.

        Returns:
            The record of this update, applied or skipped.

        Raises:
            WindowError: No backward ran, or a counted microbatch had none.
            EmptyWindow: Nothing was counted, and the policy is to raise.
            NonFiniteGradient: By policy; nothing was changed.
        """
        try:
            if self._driver.ranks is None:
                self._check_complete()
                return self._driver.step(self)
            with self._driver.ranks.failing():
                self._check_complete()
                return self._driver.step(self)
        except BaseException:
            self._drop()
            raise

    def gradients_(self) -> None:
        """Bring the true gradient of the mean loss into every `.grad` before the step.

        For those who want to look at it or change it; the step goes on from what it finds there.
        Costs one pass over the gradients where a division or a loss scale is still open.

        Raises:
            WindowError: The window has ended, or a counted microbatch had no backward.
        """
        try:
            self._check_complete()
            self._driver.gradients(self)
        except BaseException:
            self._drop()
            raise
        self._is_settled = True

    @property
    def unit(self) -> float | Tensor:
        """What `.grad` must be multiplied by to be the gradient of the mean loss, unscaled."""
        return 1.0 if self._is_settled else self._seeds.unit

    def first_nonfinite(self) -> int | None:
        """Find the first microbatch known to have brought inf or nan: by its loss, or by a look."""
        known = (self.tally.first_nonfinite(), self._first_bad)
        return min((index for index in known if index is not None), default=None)

    def again(self, microbatches: Sequence[Batch], look: Callable[[], bool]) -> Window[Batch]:
        """Make the same window once more, of the microbatches that were seen, to look at each."""
        last = len(microbatches) - 1
        pull = ((batch, index == last) for index, batch in enumerate(microbatches))
        cut = dataclasses.replace(self._cut, pull=pull)
        # No `num_in_all`: what is looked at is this rank's own, so it is never added up.
        off: dict[str, Any] = dict.fromkeys(("on_batch", "before_backward", "after_backward"))
        driver = dataclasses.replace(self._driver, look=look, drop=Window.end, is_lazy=False, **off)
        again = Window(cut, driver, scale=self.scale)
        again.tally.agree(self.denominators, {})
        return again

    def end(self) -> None:
        """Note that it was stepped or dropped, and let go of its microbatches."""
        self.ended = True
        self._cut.pull = iter(())
        self._seeds.clear()

    def _drop(self) -> None:
        if not self.ended:
            self._driver.drop(self)

    def _check_complete(self) -> None:
        if self.ended:
            raise self._misuse()
        is_empty = self.tally.counts is not None and not any(self.denominators.values())
        if self._num_backward == 0 and self._cut.size and self._cut.num_known != 0 and not is_empty:
            raise WindowError(
                "`window.step()`: no backward ran in this window, so there is no gradient to step "
                "on. Iterate over the window and call `window.backward(loss_sum)` for each "
                "microbatch."
            )
        self.tally.check_complete()
        if self._driver.accumulation is not None:
            self._driver.accumulation.finish()

    def _misuse(self) -> WindowError:
        if self.ended:
            return WindowError(
                "This window has ended: stepped, dropped after an error or when another began, or "
                "its iterator closed, as in `next(updater.windows(...))`. Use each window inside "
                "`for window in updater.windows(...):`."
            )
        return WindowError(
            "`window.backward()` outside the loop over the window's microbatches, or after "
            "`gradients_()`, so it is not known which microbatch this is. Write "
            "`for batch in window:` around it."
        )
