"""Windows: the microbatches of one update, and the numbers their losses are divided by.

    gradient = sum over ranks and microbatches of grad(loss_sum) / denominator

The window owns the denominator. Known ahead (*counted*), it goes into the backward as its seed, and
`.grad` holds the true gradient at once. Counted as it goes (*streamed*), the seed carries a
provisional power of two, so that sums stay at a sane magnitude, and what remains of the division is
one exact factor at the step. The loss that is logged is never divided before it is a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .cutting import Cut, checked_count
from .errors import CountMismatch, WindowError
from .losses import LossSum
from .records import UpdateRecord

__all__ = ["Loss", "Window"]

Batch = TypeVar("Batch")
Loss = Tensor | LossSum
_WIDE = (torch.float32, torch.float64)


class _Forward:
    """Autocast for one forward; remembers that it was used. Costs nothing in float32."""

    __slots__ = ("_autocast", "_window")

    def __init__(
        self, window: Window[Any], autocast: Callable[[], AbstractContextManager[Any]] | None
    ) -> None:
        self._window = window
        self._autocast = None if autocast is None else autocast()

    def __enter__(self) -> None:
        self._window.has_forward = True
        if self._autocast is not None:
            self._autocast.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._autocast is not None:
            self._autocast.__exit__(kind, error, trace)


class Window(Generic[Batch]):
    """The microbatches of one update. Made by `Updater.windows`; iterate, backward each, step once.

    A window begun and not stepped (an exception, a `break`) is dropped when the next begins: its
    gradients are cleared, nothing is stepped and no clock ticks.

    Attributes:
        index: Position of the current microbatch, from 0; -1 before the first.
        is_last: Whether the current microbatch is the window's last.
        denominators: What each loss term's mean is over: of the whole window when counted, of the
            microbatches so far when streamed.
        scale: What every loss of this window is multiplied by in backward.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> for window in updater.windows([torch.ones(3, 2), torch.ones(1, 2)], size=2):
        ...     for x in window:
        ...         window.backward(model(x).sum(), count=len(x))
        ...     record = window.step()
        >>> record.denominators, model.weight.grad
        ({'loss': 4}, tensor([[1., 1.]]))
    """

    __slots__ = (
        "_autocast",
        "_counts",
        "_divisor",
        "_first_bad",
        "_gradients",
        "_is_settled",
        "_last_done",
        "_look",
        "_num_backward",
        "_pull",
        "_seeds",
        "_size",
        "_step",
        "denominators",
        "ended",
        "has_forward",
        "index",
        "is_last",
        "loss_sums",
        "scale",
    )

    def __init__(
        self,
        cut: Cut[Batch],
        *,
        scale: float,
        autocast: Callable[[], AbstractContextManager[Any]] | None,
        step: Callable[[Window[Any]], UpdateRecord],
        gradients: Callable[[Window[Any]], None],
        look: Callable[[], bool] | None = None,
    ) -> None:
        self._pull = cut.pull
        self._counts = cut.counts
        self._size = cut.size
        self._autocast = autocast
        self._step = step
        self._gradients = gradients
        self._look = look
        self._first_bad: int | None = None
        self.has_forward = False
        self._num_backward = 0
        self._last_done: dict[str, int] = {}  # by term, the last microbatch that had a backward
        self._is_settled = False
        self._seeds: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._divisor: float | None = None
        self.scale = scale
        self.index = -1
        self.is_last = False
        self.ended = False
        self.loss_sums: dict[str, list[float | Tensor]] = {}
        self.denominators: dict[str, float] = {}
        for counts in cut.counts or ():
            for term, count in counts.items():
                self.denominators[term] = self.denominators.get(term, 0) + count

    def __iter__(self) -> Iterator[Batch]:
        for batch, is_last in self._pull:
            self.index += 1
            self.is_last = is_last
            self.has_forward = False
            yield batch

    @property
    def is_counted(self) -> bool:
        """Whether every denominator was known before the first forward."""
        return self._counts is not None

    @property
    def num_microbatches(self) -> int:
        """Microbatches handed out so far."""
        return self.index + 1

    def forward(self) -> AbstractContextManager[None]:
        """Run the forward of the current microbatch in its precision.

        Leaving it out is allowed in float32 on one rank; elsewhere `backward` refuses, because the
        precision that was asked for would be lost without a word.

        Returns:
            A context for the forward and the loss, not for the backward.
        """
        return _Forward(self, self._autocast)

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
        if self.ended or self._is_settled or self.index < 0:
            raise self._misuse()
        if self._autocast is not None and not self.has_forward:
            raise WindowError(
                "`window.backward()` without `with window.forward():` around this microbatch's "
                "forward, so it ran without the autocast that was asked for. Put the forward and "
                "the loss inside it."
            )
        if isinstance(loss, Mapping):
            self._backward_terms(loss)
        else:
            if self._counts is not None and len(self.denominators) != 1:
                raise self._wrong_terms(["loss"])
            term = next(iter(self.denominators)) if self._counts is not None else "loss"
            loss_sum, found = self._take(term, loss, count)
            if found:
                loss_sum.backward(self._seed(term, loss_sum))  # type: ignore[no-untyped-call]
        self._num_backward += 1
        if self._look is not None and self._first_bad is None and not self._look():
            self._first_bad = self.index

    def _backward_terms(self, losses: Mapping[str, Loss]) -> None:
        if self._counts is None:
            raise WindowError(
                f"Loss terms {sorted(losses)} in a streamed window, which can only divide by one "
                "denominator, at the step. Count the window ahead: pass `windows(..., count=f)` "
                "with `f(batch)` returning one number per term."
            )
        if not losses.keys() <= self.denominators.keys():
            raise self._wrong_terms(losses)
        live: list[Tensor] = []
        seeds: list[Tensor] = []
        for term, loss in losses.items():
            loss_sum, found = self._take(term, loss, None)
            if found:
                live.append(loss_sum)
                seeds.append(self._seed(term, loss_sum))
        if live:
            torch.autograd.backward(live, seeds)  # one walk over what the terms share

    def step(self) -> UpdateRecord:
        """End the window: look, clip, step, tick, and say what happened.

        Returns:
            The record of this update, applied or skipped.

        Raises:
            WindowError: No backward ran, or a counted microbatch had none.
            EmptyWindow: Nothing was counted, and the policy is to raise.
            NonFiniteGradient: By policy; nothing was changed.
        """
        if self.ended:
            raise self._misuse()
        self._check_complete()
        return self._step(self)

    def gradients_(self) -> None:
        """Bring the true gradient of the mean loss into every `.grad` before the step.

        For those who want to look at it or change it; the step goes on from what it finds there.
        Costs one pass over the gradients where a division or a loss scale is still open.

        Raises:
            WindowError: The window has ended, or a counted microbatch had no backward.
        """
        if self.ended:
            raise self._misuse()
        self._check_complete()
        self._gradients(self)
        self._is_settled = True

    @property
    def unit(self) -> float:
        """What `.grad` must be multiplied by to be the gradient of the mean loss, unscaled."""
        if self._is_settled:
            return 1.0
        if self._divisor is None:
            return 1.0 / self.scale
        return self._divisor / next(iter(self.denominators.values())) / self.scale

    def loss_means(self) -> dict[str, float | None]:
        """Divide each term's sum by its denominator. One host read a term on an accelerator."""
        means: dict[str, float | None] = {}
        for term, denominator in self.denominators.items():
            sums = self.loss_sums.get(term, ())
            on_device = [s for s in sums if isinstance(s, Tensor)]
            total = math.fsum(s for s in sums if not isinstance(s, Tensor))
            if on_device:
                total += torch.stack(on_device).double().sum().item()
            means[term] = total / denominator if denominator else None
        return means

    def loss_mean(self) -> float | None:
        """Add the means of all terms: the mean loss whose gradient this window took."""
        found = [mean for mean in self.loss_means().values() if mean is not None]
        return math.fsum(found) if found else None

    def first_nonfinite(self) -> int | None:
        """Find the first microbatch known to have brought inf or nan: by its loss, or by a look."""
        firsts = [
            index
            for sums in self.loss_sums.values()
            for index, loss_sum in enumerate(sums)
            if not math.isfinite(loss_sum)
        ]
        return min(firsts, default=self._first_bad)

    def again(self, microbatches: Sequence[Batch], *, look: Callable[[], bool]) -> Window[Batch]:
        """Make the same window once more, of the microbatches that were seen, to look at each."""
        last = len(microbatches) - 1
        pull = ((batch, index == last) for index, batch in enumerate(microbatches))
        return Window(
            Cut(pull, self._counts, self._size),
            scale=self.scale,
            autocast=self._autocast,
            step=self._step,
            gradients=self._gradients,
            look=look,
        )

    def _take(self, term: str, loss: Loss, count: float | Tensor | None) -> tuple[Tensor, float]:
        """Check one loss, note its sum and its count, and give both."""
        last_done = self._last_done.get(term, -1)
        if last_done >= self.index:
            raise WindowError(
                f"`window.backward()` ran twice for term `{term}` of microbatch {self.index}, so "
                "it would count twice. Call it once a microbatch, with all terms in one dict, "
                "inside the loop over the window."
            )
        self._last_done[term] = self.index
        if isinstance(loss, LossSum):
            carried = loss.count
            if count is not None:
                self._check_same(term, checked_count(count, term), checked_count(carried, term))
            loss, count = loss.sum, carried
        if self._counts is None:
            found = self._stream(term, count)
        else:
            self._check_none_missed(term, last_done + 1, self.index)
            found = self._counts[self.index].get(term, 0)
            if count is not None:
                self._check_same(term, found, checked_count(count, term))
        loss = _checked_loss(loss, needs_graph=found > 0)
        if found:
            sums = self.loss_sums.setdefault(term, [])
            if len(sums) < self.index:
                sums.extend([0.0] * (self.index - len(sums)))  # microbatches that were left out
            sums.append(loss.item() if loss.is_cpu else loss.detach())
        return loss, found

    def _stream(self, term: str, carried: float | Tensor | None) -> float:
        if carried is None:
            raise WindowError(
                "`window.backward(loss_sum)` in a streamed window without a count, so nothing says "
                "what the mean is over. Pass `count=n`, return a `LossSum`, or count the window "
                "ahead with `windows(..., count=f)`."
            )
        found = checked_count(carried, term)
        self.denominators[term] = self.denominators.get(term, 0) + found
        if self._divisor is None and found:
            self._divisor = 2.0 ** round(math.log2(found * self._size))
        return found

    def _check_same(self, term: str, counted: float, carried: float) -> None:
        # Whole numbers agree exactly; sums of weights to the rounding of a float32 sum.
        if counted == carried or math.isclose(counted, carried, rel_tol=1e-6):
            return
        raise CountMismatch(
            f"Microbatch {self.index}: the loss term `{term}` is a sum over {carried:,.10g}, and "
            f"the window's count found {counted:,.10g}, so the mean would be off by their ratio, "
            f"{_ratio(carried, counted)}. Make both see the same mask, shift and weights.",
            term=term,
            counted=counted,
            carried=carried,
        )

    def _seed(self, term: str, loss: Tensor) -> Tensor:
        key = (term, loss.dtype, loss.device)
        seed = self._seeds.get(key)
        if seed is None:
            divisor = self.denominators[term] if self._divisor is None else self._divisor
            if loss.dtype not in _WIDE and self._divisor is None and len(self.denominators) == 1:
                # 1/denominator in 8 or 11 bits would tilt the whole gradient by up to 0.4 %; a
                # power of two is exact there, and the rest of the division is exact at the step.
                if self._num_backward and self._seeds:
                    raise WindowError(
                        f"A {loss.dtype} loss after a wider one in the same window. Return the "
                        "loss of every microbatch in float32."
                    )
                self._divisor = divisor = 2.0 ** round(math.log2(divisor))
            value = self.scale / divisor
            seed = torch.full((), value, dtype=loss.dtype, device=loss.device)
            self._seeds[key] = seed
        return seed

    def _check_complete(self) -> None:
        if self._num_backward == 0:
            raise WindowError(
                "`window.step()`: no backward ran in this window, so there is no gradient to step "
                "on. Iterate over the window and call `window.backward(loss_sum)` for each "
                "microbatch."
            )
        if self._counts is not None:
            for term in self.denominators:
                first = self._last_done.get(term, -1) + 1
                self._check_none_missed(term, first, len(self._counts))

    def _check_none_missed(self, term: str, start: int, stop: int) -> None:
        assert self._counts is not None
        for index in range(start, stop):
            if self._counts[index].get(term):
                raise WindowError(
                    f"Microbatch {index} was counted for `{term}` and had no backward, so the mean "
                    "would be over targets that gave no gradient. Run backward for every "
                    "microbatch of a counted window, or stream the counts."
                )

    def _wrong_terms(self, losses: Any) -> WindowError:
        return WindowError(
            f"The loss has terms {sorted(losses)}, the window counted {sorted(self.denominators)}. "
            "Without its own denominator a term has no mean. Give `count` and `loss` the same "
            "terms."
        )

    def _misuse(self) -> WindowError:
        if self.ended:
            return WindowError(
                "This window has ended (it was stepped, or dropped when another began). Take the "
                "next one from `updater.windows(...)`."
            )
        return WindowError(
            "`window.backward()` outside the loop over the window's microbatches, or after "
            "`gradients_()`, so it is not known which microbatch this is. Write "
            "`for batch in window:` around it."
        )


def _checked_loss(loss: object, *, needs_graph: bool) -> Tensor:
    if not isinstance(loss, Tensor):
        raise WindowError(
            f"The loss is a `{type(loss).__name__}`, which has no gradient. Return the loss sum as "
            "a tensor of shape [], or a `LossSum`."
        )
    if loss.numel() != 1:
        raise WindowError(
            f"The loss has shape {list(loss.shape)}; a gradient is of one number. Return the sum "
            'over the microbatch, for example with `reduction="sum"`.'
        )
    if needs_graph and not loss.requires_grad:
        raise WindowError(
            "The loss has no graph, so no parameter would get a gradient from it. Check for "
            "`torch.no_grad()`, `.detach()`, `.item()` or frozen parameters on its way."
        )
    if not loss.is_floating_point():
        raise WindowError(f"The loss is {loss.dtype}; it must be a real floating-point number.")
    return loss if loss.ndim == 0 else loss.reshape(())


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.4g}" if b else "infinite"
