"""The tally of a window: what each term counted, what its losses summed to, and whether they agree.

Counted ahead, the denominators are known before the first forward and every loss is held against
them. Streamed, they grow with the losses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from .errors import CountMismatch, WindowError
from .losses import LossSum
from .terms import checked_count

__all__ = ["Loss", "Tally", "UnreadCount"]

Loss: TypeAlias = Tensor | LossSum


@dataclasses.dataclass(frozen=True, slots=True)
class UnreadCount:
    """A count that came with a loss, on its device, beside what the window counted."""

    term: str
    index: int
    counted: float
    carried: Tensor

    def gap(self) -> Tensor:
        """How far the two are apart: more than 1 is too far. Shape [], no host sync."""
        if isinstance(self.counted, int) and not self.carried.is_floating_point():
            return (self.carried - self.counted) * 2.0
        return (self.carried - self.counted) / (max(self.counted, 1e-30) * 1e-6)

    def check(self) -> None:
        """Read it.

        Raises:
            CountMismatch: The two differ.
        """
        _check_same(self.term, self.counted, checked_count(self.carried, self.term), self.index)


class Tally:
    """Counts and loss sums of one window, by term.

    Attributes:
        counts: What each microbatch counts; None when the counts come with the losses.
        denominators: What each term's mean is over.
        num_in_all: Microbatches of all ranks, where that was learnt at the window's end.
        unread_counts: Counts that losses carried and nobody has looked at yet.
    """

    __slots__ = (
        "_agreed_sums",
        "_is_lazy",
        "_last_done",
        "_loss_means",
        "_loss_sums",
        "counts",
        "denominators",
        "num_in_all",
        "unread_counts",
    )

    def __init__(self, counts: list[dict[str, float]] | None, *, is_lazy: bool = False) -> None:
        self.counts = counts
        self.unread_counts: list[UnreadCount] = []
        self.num_in_all: int | None = None
        self._is_lazy = is_lazy
        self.denominators: dict[str, float] = {}
        self._loss_sums: dict[str, list[float | Tensor]] = {}
        self._agreed_sums: dict[str, float] = {}
        self._loss_means: dict[str, float | None] | None = None  # once asked for
        self._last_done: dict[str, int] = {}  # the last microbatch that had a backward
        for counted in counts or ():
            for term, count in counted.items():
                self.denominators[term] = self.denominators.get(term, 0) + count

    def only_term(self) -> str:
        """Name the one term that a bare loss belongs to.

        Raises:
            WindowError: The window counted several.
        """
        if self.counts is None:
            return "loss"
        if len(self.denominators) != 1:
            raise self._wrong_terms(["loss"])
        return next(iter(self.denominators))

    def check_terms(self, terms: Iterable[str]) -> None:
        """Refuse losses that the window has no denominator for.

        Raises:
            WindowError: The window is streamed, or counted other terms.
        """
        if self.counts is None:
            raise WindowError(
                f"Loss terms {sorted(terms)} in a streamed window, which can only divide by one "
                "denominator, at the step. Count the window ahead: pass `windows(..., count=f)` "
                "with `f(batch)` returning one number per term."
            )
        if not set(terms) <= self.denominators.keys():
            raise self._wrong_terms(terms)

    def take(
        self, term: str, loss: Loss, count: float | Tensor | None, index: int
    ) -> tuple[Tensor, float]:
        """Check the loss of one microbatch, note its sum and its count, and give both.

        Raises:
            WindowError: It is no loss sum, has no count, or this microbatch had one already.
            CountMismatch: It carries another count than the window found.
        """
        last_done = self._last_done.get(term, -1)
        if last_done >= index:
            raise WindowError(
                f"`window.backward()` ran twice for term `{term}` of microbatch {index}, so it "
                "would count twice. Call it once a microbatch, with all terms in one dict, inside "
                "the loop over the window."
            )
        self._last_done[term] = index
        self._loss_means = None
        if isinstance(loss, LossSum):
            carried = loss.count
            if count is not None:
                _check_same(term, checked_count(count, term), checked_count(carried, term), index)
            loss, count = loss.sum, carried
        if self.counts is None:
            found = self._stream(term, count)
        else:
            if last_done + 1 < index:
                self._check_none_missed(term, last_done + 1, index)
            found = self.counts[index].get(term, 0)
            if self._is_lazy and isinstance(count, Tensor):
                self.unread_counts.append(UnreadCount(term, index, found, count))
            elif count is not None:
                _check_same(term, found, checked_count(count, term), index)
        loss = _checked_loss(loss, needs_graph=found > 0)
        if found:
            sums = self._loss_sums.setdefault(term, [])
            if len(sums) < index:
                sums.extend([0.0] * (index - len(sums)))  # microbatches that were left out
            stays = self._is_lazy or not loss.is_cpu
            sums.append(loss.detach() if stays else loss.item())
        return loss, found

    def check_complete(self) -> None:
        """Refuse to go on while a counted microbatch has had no backward.

        Raises:
            WindowError: One has not.
        """
        if self.counts is not None:
            for term in self.denominators:
                first = self._last_done.get(term, -1) + 1
                self._check_none_missed(term, first, len(self.counts))

    def agree(self, denominators: Mapping[str, float], loss_sums: Mapping[str, float]) -> None:
        """Take the denominators and loss sums of all ranks together."""
        self._loss_means = None
        self.denominators.update(denominators)
        self._agreed_sums.update(loss_sums)

    @property
    def is_agreed(self) -> bool:
        """Whether the loss sums of all ranks are known."""
        return bool(self._agreed_sums)

    def loss_sum(self, term: str) -> float:
        """Add up a term's loss over this rank. One host read on an accelerator."""
        sums = self._loss_sums.get(term, ())
        on_device = [s for s in sums if isinstance(s, Tensor)]
        total = sum(s for s in sums if not isinstance(s, Tensor))
        if on_device:
            total += torch.stack(on_device).double().sum().item()
        return total

    def loss_means(self) -> dict[str, float | None]:
        """Divide each term's sum by its denominator, over all ranks."""
        if self._loss_means is not None:
            return dict(self._loss_means)
        means: dict[str, float | None] = {}
        for term, denominator in self.denominators.items():
            total = self._agreed_sums.get(term)
            total = self.loss_sum(term) if total is None else total
            means[term] = total / denominator if denominator else None
        self._loss_means = means
        return dict(means)

    def unread_sums(self) -> list[Tensor]:
        """The loss of each microbatch that still lies on its device."""
        return [s for sums in self._loss_sums.values() for s in sums if isinstance(s, Tensor)]

    def read(self, numbers: Iterator[float]) -> None:
        """Take the loss of each of `unread_sums`, read elsewhere."""
        self._loss_means = None
        for sums in self._loss_sums.values():
            sums[:] = [next(numbers) if isinstance(s, Tensor) else s for s in sums]

    def unread_total(self, term: str) -> Tensor | None:
        """Add up a term's loss over this rank and leave it there; None where it has none."""
        sums = [s for s in self._loss_sums.get(term, ()) if isinstance(s, Tensor)]
        return torch.stack(sums).double().sum() if sums else None

    def check_unread(self) -> None:
        """Read the counts that losses carried.

        Raises:
            CountMismatch: One is another than the window found.
        """
        for count in self.unread_counts:
            count.check()
        self.unread_counts.clear()

    def first_nonfinite(self) -> int | None:
        """Find the first microbatch whose loss was inf or nan."""
        firsts = [
            index
            for sums in self._loss_sums.values()
            for index, loss_sum in enumerate(sums)
            if not math.isfinite(loss_sum)
        ]
        return min(firsts, default=None)

    def _stream(self, term: str, carried: float | Tensor | None) -> float:
        if carried is None:
            raise WindowError(
                "`window.backward(loss_sum)` in a streamed window without a count, so nothing says "
                "what the mean is over. Pass `count=n`, return a `LossSum`, or count the window "
                "ahead with `windows(..., count=f)`."
            )
        found = checked_count(carried, term)
        self.denominators[term] = self.denominators.get(term, 0) + found
        return found

    def _check_none_missed(self, term: str, start: int, stop: int) -> None:
        assert self.counts is not None
        for index in range(start, stop):
            if self.counts[index].get(term):
                raise WindowError(
                    f"Microbatch {index} was counted for `{term}` and had no backward, so the mean "
                    "would be over targets that gave no gradient. Run backward for every "
                    "microbatch of a counted window, or stream the counts."
                )

    def _wrong_terms(self, losses: Iterable[str]) -> WindowError:
        return WindowError(
            f"The loss has terms {sorted(losses)}, the window counted {sorted(self.denominators)}. "
            "Without its own denominator a term has no mean. Give `count` and `loss` the same "
            "terms."
        )


def _check_same(term: str, counted: float, carried: float, index: int) -> None:
    # Whole numbers agree exactly; sums of weights to the rounding of a float32 sum.
    is_whole = isinstance(counted, int) and isinstance(carried, int)
    if counted == carried or (not is_whole and math.isclose(counted, carried, rel_tol=1e-6)):
        return
    ratio = f"{carried / counted:.4g}" if counted else "infinite"
    raise CountMismatch(
        f"Microbatch {index}: the loss term `{term}` is a sum over {carried:,.10g}, and the "
        f"window's count found {counted:,.10g}, so the mean would be off by their ratio, {ratio}. "
        "Make both see the same mask, shift and weights.",
        term=term,
        counted=counted,
        carried=carried,
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
