"""The updater: the one place that knows the order of a step.

    window (denominator) -> autocast forward -> seeded backward -> statistics -> policy (verdict)
      -> clip (factor) -> step -> clocks (loss scale, schedule) -> record -> observers -> sinks

Every stage is a file of its own and none knows another. `_finish` below is the order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from .accumulation.stage import Accumulation, attached
from .autorows import AutoRows
from .blame import Culprit, empty_error, names_of, report_strangers
from .clip.norm import ByGlobalNorm
from .clip.rule import Decision, Rule
from .clock import Clock
from .cutting import Count, Cut, Cutting, cut_of, cutting_of
from .ending import UNDECIDED, Books, Ending
from .errors import WindowError
from .feed import Feed
from .fitting import fitted
from .gradients import Gradients
from .late import Late
from .measuring import agree, bring_, gathered, is_finite_here
from .nonfinite import Policy, Raise
from .observers.observer import Observer, Subject
from .observers.observing import Observing
from .passes import LossFunction, Pass, counted_already
from .precision import FP32, LossScale, Precision, autocast_of
from .ranks import ranks_of
from .rates import Rates, Schedule, rates_of
from .records import UpdateRecord, Verdict
from .stepping import AveragesWeights, check_optimizer, lr_of, parameters_of, stage_of, step
from .window import Driver, Window

if TYPE_CHECKING:
    from .ranks.sharded import Sharding

__all__ = ["Updater"]

Batch = TypeVar("Batch")


class Updater:
    r"""Turns microbatches into updates: exact gradient, one clip, a sound step, an honest clock.

        gradient = sum over ranks and microbatches of grad(loss_sum) / denominator

    However a batch is cut, the gradient is the same up to rounding. What is clipped is exactly what
    the optimizer steps. A skipped update leaves no trace in weights, optimizer state, schedule,
    clip statistics or averaged weights. After an applied update every `.grad` holds the true
    clipped gradient, until the next window clears it.

    Costs beside forward, backward and the optimizer: one read of the gradients (their norm), and
    one multiplication where a division, a loss scale or a clip coefficient is open and the
    optimizer is not fused. No host sync on an accelerator where the updater is lazy, one elsewhere.

    Args:
        model: Whose parameters are trained; may be compiled or wrapped.
        optimizer: Any torch optimizer that steps on `.grad`. `fused=True` saves a pass.
        clip: Bounds the gradient; None only measures it.
        precision: What the forward runs in, and how the loss is scaled. `FP32()` by default.
        nonfinite: What to do when a gradient is not finite. `Raise()` by default.
        empty: What to do with a window without targets. `Raise()` by default.
        schedule: A torch scheduler of this optimizer, or a function from the number of applied
            updates to the factor on each group's base rate. Ticks after applied updates only.
        averaged_model: An average of the weights, kept up after applied updates.
        sharding: What FSDP2 trades inside a window, memory for traffic; only for sharded models.
        check_replicas_every: After so many applied updates each, compare the weights of ranks that
            hold the same ones; None for never. Costs a read of them.
        observers: What looks at updates and adds to their records; see `midstep.observers`.
        sinks: Called with each record, on every rank. One that fails warns once, and no more.
        accumulation: How gradients are added up; see `midstep.accumulation`. None as autograd does.
        lazy: Leave verdicts on the device; the host is told one update later, so that no update
            waits (see `settle`). None does so on one accelerator where every stage can.

    Raises:
        TypeError: The optimizer wants a closure, or a stage is no stage.
        ValueError: The precision cannot train these parameters, the scheduler is another
            optimizer's, or a stage needs the host and `lazy=True`.
        NotImplementedError: The model is wrapped in FSDP1.

    Warns:
        UserWarning: Parameters of the model that the optimizer lacks, or the reverse.

    Example:
        >>> import midstep as ms
        >>> model = torch.nn.Linear(2, 1)
        >>> updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1),
        ...                      clip=ms.ByGlobalNorm(1.0))
        >>> def loss(model, batch):
        ...     return (model(batch) - 1.0).square().sum()
        >>> batches = [torch.ones(3, 2), torch.ones(1, 2)]
        >>> for window in updater.windows(batches, size=2, count=ms.rows()):
        ...     record = updater.update(window, loss)
        >>> record.verdict, record.denominators, record.step
        (<Verdict.APPLIED: 'applied'>, {'loss': 4}, 1)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        clip: Rule | None = None,
        precision: Precision | None = None,
        nonfinite: Policy | None = None,
        empty: Policy | None = None,
        schedule: Schedule | None = None,
        averaged_model: AveragesWeights | None = None,
        sharding: Sharding | None = None,
        check_replicas_every: int | None = None,
        observers: Sequence[Observer] = (),
        sinks: Sequence[Callable[[UpdateRecord], None]] = (),
        accumulation: Accumulation | None = None,
        lazy: bool | None = None,
    ) -> None:
        check_optimizer(optimizer)
        self.model = model
        self.optimizer = optimizer
        self.clip: Rule = stage_of("clip", clip, ByGlobalNorm(math.inf), "decide")
        self.precision: Precision = stage_of("precision", precision, FP32(), "loss_scale")
        self.precision.check(parameters_of(optimizer))
        self.nonfinite: Policy = stage_of("nonfinite", nonfinite, Raise(), "goes_on")
        self.empty: Policy = stage_of("empty", empty, Raise(), "goes_on")
        self.averaged_model = averaged_model
        self.rates: Rates = rates_of(optimizer, schedule)
        report_strangers(model, optimizer)
        names = names_of(model, parameters := parameters_of(optimizer))
        self._ranks = ranks_of(model, names, parameters, sharding, check_replicas_every)
        self._books = Books(self.precision.loss_scale(), self.rates, sinks, self._ranks, optimizer)
        subject = Subject(model, optimizer, parameters, names, self._ranks)
        self._observing = Observing(observers, subject, lambda: self._late.next_update, names_of)
        order = (self.clip, self.nonfinite, self._books, self._commit)
        self._late = Late(subject, *order, observing=self._observing, wanted=lazy)
        driver = Driver(
            step=self._finish,
            gradients=lambda window: bring_(window, optimizer, self.clip, self._ranks),
            drop=lambda window: self._feed.drop(window),  # noqa: PLW0108 - the feed is made next
            autocast=autocast_of(self.precision, list(model.parameters())),
            look=self._look if self.nonfinite.every_microbatch else None,
            ranks=self._ranks,
            is_lazy=self._late.is_on,
            accumulation=attached(accumulation, model, optimizer, self._ranks),
        )
        self._feed = Feed(model, optimizer, driver, self._observing)
        self._empty = self.empty
        self._rerun: Callable[[], int | None] | None = None

    @property
    def clock(self) -> Clock:
        """The clocks of the run. Settles first."""
        self.settle()
        return self._books.clock

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale. Settles first."""
        self.settle()
        return self._books.loss_scale

    # -- the doors ------------------------------------------------------------------------------

    def windows(
        self,
        batches: Iterable[Batch],
        *,
        size: int | None = None,
        rows: int | AutoRows | None = None,
        targets: int | None = None,
        count: Count | None = None,
        drop_tail: bool = False,
        empty: Policy | None = None,
    ) -> Iterator[Window[Batch]]:
        """Cut one pass over the data into windows; one update each.

        Exactly one of `size`, `rows` and `targets` says how. With `count` each window is read ahead
        (host memory of one window) and its denominators are known before the first forward; without
        it the counts come with the losses and one batch is read ahead. A window that was begun and
        not stepped is dropped, gradients cleared, when the next begins or this iterator is closed.

        Args:
            batches: Microbatches, or with `rows` the batches to cut. Read once.
            size: So many batches a window. The last may be short; it has its own denominator.
            rows: Each batch is a window, cut into microbatches of at most so many rows, or with
                `AutoRows()` of as many as fit.
            targets: As many batches a window as hold at least so many targets (of the first term).
            count: What the mean is over, in one microbatch: a number, or one per loss term.
            drop_tail: Leave out a last window that is short.
            empty: Overrides the updater's policy for windows without targets.

        Yields:
            Each window, cleared and ready.

        Raises:
            ValueError: Not exactly one of the three, or one of them is below 1.
        """
        way = cutting_of(size=size, rows=rows, targets=targets, drop_tail=drop_tail, count=count)
        return self._windows(batches, way, count, stage_of("empty", empty, self.empty, "goes_on"))

    def _windows(
        self, batches: Iterable[Batch], way: Cutting, count: Count | None, empty: Policy
    ) -> Iterator[Window[Batch]]:
        yield from self._feed.windows(
            batches, way, count, lambda cut: self._begin(cut, empty, count is not None)
        )
        self.clock.epoch += 1  # settles, so that the last record of a pass reaches the sinks

    def _begin(
        self, cut: Cut[Batch] | None, empty: Policy, is_counted: bool
    ) -> Window[Batch] | None:
        self._empty = empty
        return self._feed.begin(cut, scale=self._books.loss_scale.ahead, is_counted=is_counted)

    def update(
        self,
        window: Window[Batch] | Sequence[Batch],
        loss: LossFunction[Batch],
        *,
        count: Count | None = None,
    ) -> UpdateRecord:
        """Run a whole window through the model and step.

        Args:
            window: A window of `windows`, or a list of microbatches to make one of.
            loss: `loss(model, microbatch)` gives the loss sum: a tensor of shape [], a `LossSum`,
                or one of these per term. It runs inside autocast.
            count: For a list of microbatches, as in `windows`.

        Raises:
            WindowError: The loss is not what its window needs; see `Window.backward`.
            EmptyWindow: Nothing was counted, and the policy is to raise.
            NonFiniteGradient: By policy; names parameters and microbatch.
        """
        if isinstance(window, Window):
            if count is not None:
                raise counted_already()
        else:
            cut = cut_of(list(window), count)
            begun = self._begin(cut, self.empty, count is not None)
            assert begun is not None  # there is a cut
            window = begun
        try:
            if window.elastic is None:
                return self._step(window, Pass(window, self.model, loss).run())
            trained = (self._feed, self.model, self._ranks)
            return fitted(window, *trained, loss=loss, end=self._step)
        finally:
            if not window.ended:
                self._feed.drop(window)

    def _step(self, window: Window[Batch], passed: Pass[Batch]) -> UpdateRecord:
        self._rerun = lambda: passed.first_bad_microbatch(self._look, self._ranks)
        try:
            return window.step()
        finally:
            self._rerun = None

    def report_metric(self, metric: float) -> None:
        """Give a `ReduceLROnPlateau` schedule what it watches, such as the held-out loss.

        Raises:
            ValueError: The schedule takes no metric.
        """
        self.settle()
        self.rates.report(metric)

    def settle(self) -> None:
        """Have the last update of a lazy updater told to the host: one host sync.

        It is told anyway before the next step, when its record, the clock or the state is read, and
        when `windows` ends. Until then schedule, averaged model and sinks are one update behind.

        Raises:
            NonFiniteGradient: By policy, of the last update. Nothing was touched.
        """
        self._late.settle()

    def state_dict(self) -> dict[str, Any]:
        """Give everything but model, optimizer and random state, as plain values and tensors.

        Raises:
            WindowError: A window is open; its gradients would be lost.
        """
        if self._feed.window is not None:
            raise WindowError(
                "The state was asked for inside a window, whose gradients would be lost. Save "
                "after `window.step()`."
            )
        self.settle()
        return self._books.state_dict() | {
            "clip": self.clip.state_dict(),
            "observers": self._observing.state_dict(),
            **self._feed.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from an earlier run; the next `windows` reads on at its place, where one is given.

        Raises:
            ValueError: The loss scale is on in one run and off in the other.
        """
        self._late.forget()  # of weights that are about to be replaced
        self._books.load_state_dict(state)
        self.clip.load_state_dict(state["clip"])
        self._observing.load_state_dict(state.get("observers", {}))
        self._feed.load_state_dict(state)

    # -- the order ------------------------------------------------------------------------------

    def _finish(self, window: Window[Any]) -> UpdateRecord:
        """Look, judge, clip, step, tick, record."""
        self.settle()
        observing = self._observing
        gradients = gathered(window, self.optimizer, self._ranks)
        if self._late.can_take(window, gradients):
            record = self._late.launch(window, gradients, started=self._feed.started)
            self._feed.end(window)
            return record
        agree(window, gradients, self.clip, self._ranks, each=observing.needs_each)
        if not any(window.denominators.values()):
            return self._end_empty(window)
        gradients.mul_(float(window.unit))
        grad_norm = gradients.norm(self.clip.p)
        observing.on_gradients(gradients)
        if not math.isfinite(grad_norm):
            return self._end_nonfinite(window, gradients, grad_norm)
        attempt = self._books.attempt(window)
        decision = self.clip.decide(gradients, attempt)
        if decision.skip:
            return self._end(window, Verdict.SKIPPED_SPIKE, grad_norm, decision)
        observing.before_step(gradients)
        step(self.optimizer, gradients, window.take_step)
        observing.after_step(gradients)
        self._commit(decision)
        return self._end(window, Verdict.APPLIED, grad_norm, decision)

    def _end(
        self,
        window: Window[Any],
        verdict: Verdict,
        grad_norm: float | None = None,
        decision: Decision = UNDECIDED,
        num_nonfinite: int = 0,
    ) -> UpdateRecord:
        """Tick the clocks, each by its own rule, and write the record."""
        extra = self._observing.extra(decision.threshold)
        seconds = time.perf_counter() - self._feed.started
        lr, scale = lr_of(self.optimizer), float(window.scale)  # before the clocks move them
        self._feed.end(window)
        ending = Ending(verdict, lr, scale, seconds, grad_norm, decision, num_nonfinite, extra)
        record = self._books.tick(window, ending)
        if not verdict.applied:
            self._feed.clear()
        self._books.publish(record)
        return record

    def _commit(self, decision: Decision) -> None:
        """Take an applied update into what remembers them; the weights are still its own."""
        self.clip.commit(decision)
        if self.averaged_model is not None:
            self.averaged_model.update_parameters(self.model)

    def _end_empty(self, window: Window[Any]) -> UpdateRecord:
        clock = self._books.clock
        if self._empty.goes_on(clock.skipped_in_a_row, explained=False):
            return self._end(window, Verdict.SKIPPED_EMPTY)
        self._feed.end(window)
        self._feed.clear()
        raise empty_error(window.num_microbatches, update=clock.update + 1)

    def _end_nonfinite(
        self, window: Window[Any], gradients: Gradients, grad_norm: float
    ) -> UpdateRecord:
        names = names_of(self.model, gradients.parameters)
        # By the losses alone: a look sees an overflow that the scale explains, too.
        culprit = Culprit.found(self._ranks, gradients, names, window.tally.first_nonfinite())
        explained = culprit.microbatch is None and self._books.loss_scale.explains_overflow()
        clock = self._books.clock
        if self.nonfinite.goes_on(clock.skipped_in_a_row, explained=explained):
            verdict, num = Verdict.SKIPPED_NONFINITE, culprit.num_nonfinite
            return self._end(window, verdict, grad_norm, num_nonfinite=num)
        find = window.first_nonfinite if self.nonfinite.every_microbatch else self._rerun
        if find is not None and (culprit.microbatch is None or self.nonfinite.every_microbatch):
            self._feed.clear()
            culprit = Culprit.found(self._ranks, None, (), find(), culprit.parameters)
        self._feed.end(window)
        self._feed.clear()
        raise culprit.error(update=clock.update + 1)

    def _look(self) -> bool:
        return is_finite_here(self.optimizer, self._ranks)
