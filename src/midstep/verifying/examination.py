"""The examination: the whole batch, its cuts, the bound between them, and the planted faults."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import torch

from ..errors import MidstepError
from .borrowing import same_bits
from .certificate import Comparison, Control
from .draws import Kept, Replayed
from .operations import seen_by
from .rounding import NUM_DRAWS, Moved, unit_roundoff
from .subject import Cut, Gradient, Piece, Subject, cuts_of, gap, norm, norms
from .updates import NextUpdate

_REPEATS = 0.25  # of what rounding may do
_WIDE = 1e-3  # of the gradient: rounding seldom does as much
_NUM_REPEATS, _NUM_DOUBTED = 2, 12

__all__ = ["Accumulated", "Examination", "Held", "NothingToCompare"]


class NothingToCompare(MidstepError, ValueError):
    """The whole batch has no finite gradient that pieces could be held against."""


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What is the same for each piece as for the whole.

    Attributes:
        draws: Each row gets the random numbers it had in the whole.
        state: Each piece begins with the buffers and attributes the whole began with.
    """

    draws: bool = False
    state: bool = False


@dataclasses.dataclass(slots=True)
class Accumulated:
    """What the microbatches of one cut add up to.

    Attributes:
        gradient: sum of grad(loss_sum) / sum of counts, all terms together.
        lengths: For each parameter the sum of the lengths of what was added.
        mean_of_means: What it would be if each microbatch weighed the same.
        largest: Most that one microbatch brought.
        pieces: Counts and loss sums of each, without gradients.
    """

    gradient: Gradient
    lengths: list[float]
    mean_of_means: Gradient
    largest: Gradient
    pieces: list[Piece]

    @property
    def has_finite_gradient(self) -> bool:
        """Whether the gradient holds neither inf nor nan."""
        return math.isfinite(norm(self.gradient))

    @property
    def is_finite(self) -> bool:
        """Whether neither the gradient does nor a loss that counts."""
        losses = [loss for p in self.pieces for t, loss in p.losses.items() if p.counts[t]]
        return self.has_finite_gradient and all(map(math.isfinite, losses))


class Examination:
    """Runs what is compared; the first run is that of the whole batch.

    Args:
        subject: Model, batch, loss and count.
        update: Makes the next update; None compares gradients alone.

    Attributes:
        whole: The whole batch.
        full: Its gradient of the mean loss.
        drew: Random streams that its forward moved.
        changed: Buffers and attributes that it changed.
        repeats: Whether the whole gives its gradient again when everything is put back.
        update_repeats: Whether the same gradient makes the same update twice.
        wander: For each parameter, how far rounding may move one computation of its gradient.
        cuts: The ways to cut it.

    Raises:
        NothingToCompare: It counts nothing, or its gradient is zero or not finite.
    """

    def __init__(self, subject: Subject, update: NextUpdate | None) -> None:
        self.subject = subject
        self.update = update
        self.rows = tuple(range(subject.num_rows))
        subject.lent.rewind()
        self.whole = subject.run(self.rows)
        self.drew = subject.lent.drew()
        self.changed = subject.lent.changed()
        if not any(self.whole.counts.values()):
            raise NothingToCompare(
                "`count` found nothing in the whole batch, so there is no mean loss. Give a batch "
                "with targets."
            )
        self.full = self.whole.over(self.whole.counts)
        self._check(self.full)
        self.cuts = cuts_of(subject.num_rows)
        moved = [self._moved(seed) for seed in range(NUM_DRAWS)]
        drifts = [norms(gap(gradient, self.full)) for gradient in moved]
        self.wander = [max(column) for column in zip(*drifts, strict=True)]
        if not math.isfinite(math.hypot(*self.wander)):
            raise NothingToCompare(
                "With inputs moved by a few units of rounding the gradient is not finite any more, "
                "so no bound can be given. The loss stands on an edge (a root or a logarithm of 0, "
                "a division by the difference of equal numbers): give another batch."
            )
        self.repeats = self._repeats()
        self.update_repeats = True
        self._find_update(moved)
        self.kept: Kept | None = None

    def _find_update(self, moved: list[Gradient]) -> None:
        if self.update is None:
            return
        self._after = self._weights_after(self.full)
        again = self._weights_after(self.full)
        self.update_repeats = all(map(same_bits, again, self._after))
        drifts = [norms(gap(self._weights_after(g), self._after)) for g in moved]
        self._update_bounds = [
            2 * max(column) + 4 * unit_roundoff(w.dtype) * length
            for *column, w, length in zip(*drifts, self._after, norms(self._after), strict=True)
        ]

    def accumulate(self, cut: Cut, held: Held) -> Accumulated:
        """Run the pieces of a cut one after the other, as training would, and add them up.

        Args:
            cut: The pieces.
            held: What each of them shares with the whole.
        """
        self.subject.lent.rewind()
        sums: dict[str, Gradient] = {}
        lengths: dict[str, list[float]] = {}
        totals: dict[str, float] = {}
        means: Gradient | None = None
        largest: Gradient | None = None
        pieces = []
        for rows in cut.pieces:
            piece = self._piece(rows, held)
            for term, gradient in piece.gradients.items():
                totals[term] = totals.get(term, 0.0) + piece.counts[term]
                if piece.counts[term]:
                    sums[term] = _plus(sums.get(term), gradient)
                    before = lengths.get(term, [0.0] * len(gradient))
                    lengths[term] = [a + b for a, b in zip(before, norms(gradient), strict=True)]
            means = _plus(means, [g / len(cut.pieces) for g in piece.over(piece.counts)])
            mine = piece.over(self.whole.counts) if all(self.whole.counts.values()) else self.full
            if largest is None or norm(mine) > norm(largest):
                largest = mine
            pieces.append(dataclasses.replace(piece, gradients={}))
        gradient = [torch.zeros_like(g) for g in self.full]
        spread = [0.0] * len(gradient)
        for term, total in sums.items():
            gradient = _plus(gradient, [g / totals[term] for g in total])
            spread = [a + b / totals[term] for a, b in zip(spread, lengths[term], strict=True)]
        assert means is not None
        assert largest is not None
        return Accumulated(gradient, spread, means, largest, pieces)

    def pieces(self, cut: Cut, held: Held) -> list[Piece]:
        """Run the pieces of a cut, and keep the gradient of each.

        Args:
            cut: The pieces.
            held: What each of them shares with the whole.
        """
        self.subject.lent.rewind()
        return [self._piece(rows, held) for rows in cut.pieces]

    def compare(self, cut: Cut, held: Held = Held()) -> tuple[Comparison, Accumulated | None]:
        """Hold the gradient of a cut, and the update it makes, against those of the whole.

        Args:
            cut: The pieces.
            held: What each of them shares with the whole.
        """
        try:
            found = self.accumulate(cut, held)
        except Exception as error:  # noqa: BLE001 - the whole ran: that a piece does not is a finding
            words = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return self._failed(cut, words), None
        bounds = self.bounds(found, len(cut.pieces))
        worst, name = self._worst(gap(found.gradient, self.full), bounds)
        return (
            Comparison(
                cut=cut.name,
                num_microbatches=len(cut.pieces),
                gap=norm(gap(found.gradient, self.full)) / norm(self.full),
                worst=worst,
                worst_parameter=name,
                ratio=_ratio(found.gradient, self.full),
                update_worst=self._update_worst(found.gradient),
            ),
            found,
        )

    def bounds(self, found: Accumulated, num_pieces: int) -> list[float]:
        """Bound, for each parameter, how far rounding may part two equal gradients."""
        return [
            2 * wander + num_pieces * unit_roundoff(g.dtype) * length
            for wander, g, length in zip(self.wander, self.full, found.lengths, strict=True)
        ]

    def controls(self, results: dict[str, Accumulated]) -> list[Control]:
        """Plant faults in what was just compared, and see whether they are noticed.

        Args:
            results: What each cut added up to.
        """
        uneven, ones = results["uneven"], results["ones"]
        num = len(uneven.pieces)
        bounds = self.bounds(uneven, num)
        faults = {
            f"divided {num} times too little": [g * num for g in uneven.gradient],
            "a mean of means": uneven.mean_of_means,
        }
        found = [
            Control(fault=fault, worst=self._worst(gap(planted, self.full), bounds)[0])
            for fault, planted in faults.items()
        ]
        without = gap(ones.gradient, ones.largest)
        row_bounds = self.bounds(ones, len(ones.pieces))
        worst = self._worst(gap(without, self.full), row_bounds)[0]
        return [*found, Control(fault="one row left out", worst=worst)]

    def _repeats(self) -> bool:
        # What nobody put back shows here as large as in the moved runs; rounding does not: it is a
        # unit, where they are moved by 12 and more. But noise is small, or nothing, by chance: of
        # two goes in 1 of 25. So where it could be noise there are more.
        wander = math.hypot(*self.wander)
        num, done = _NUM_REPEATS, 0
        if wander > _WIDE * norm(self.full):
            num = _NUM_DOUBTED
        while done < num:
            self.subject.lent.rewind()
            again = self.subject.run(self.rows).over(self.whole.counts)
            apart = norm(gap(again, self.full))
            if apart > _REPEATS * wander:
                return False
            num = _NUM_DOUBTED if apart else num
            done += 1
        return True

    def _weights_after(self, gradient: Gradient) -> Gradient:
        assert self.update is not None
        self.subject.lent.rewind()
        return self.update.weights_after(gradient)

    def _update_worst(self, gradient: Gradient) -> float | None:
        if self.update is None:
            return None
        return self._worst(gap(self._weights_after(gradient), self._after), self._update_bounds)[0]

    def _piece(self, rows: tuple[int, ...], held: Held) -> Piece:
        mode: Any = contextlib.nullcontext()
        if held.state:
            self.subject.lent.rewind(draws=False)
        if held.draws:
            self.subject.lent.rewind(state=False)
            mode = seen_by(Replayed(self._draws(), rows, self.subject.num_rows))
        return self.subject.run(rows, mode)

    def _draws(self) -> Kept:
        if self.kept is None:
            state = self.subject.lent.present()
            self.subject.lent.rewind()
            self.kept = Kept()
            self.subject.run(self.rows, seen_by(self.kept))
            state.restore()
        return self.kept

    def _moved(self, seed: int) -> Gradient:
        self.subject.lent.rewind()
        mode = seen_by(Moved(torch.Generator().manual_seed(seed)))
        return self.subject.run(self.rows, mode).over(self.whole.counts)

    def _worst(self, differences: Gradient, bounds: list[float]) -> tuple[float, str]:
        shares = [
            (_share(length, bound), name)
            for length, bound, name in zip(
                norms(differences), bounds, self.subject.lent.names, strict=True
            )
        ]
        return max(shares, default=(0.0, ""))

    def _check(self, gradient: Gradient) -> None:
        length = norm(gradient)
        if length == 0 or not math.isfinite(length):
            what = "zero" if length == 0 else "not finite"
            raise NothingToCompare(
                f"The gradient of the whole batch is {what}, so every way to cut it would pass. "
                "Give a batch, weights and a loss with a gradient."
            )

    def _failed(self, cut: Cut, words: str) -> Comparison:
        return Comparison(
            cut=cut.name,
            num_microbatches=len(cut.pieces),
            gap=math.nan,
            worst=math.inf,
            worst_parameter="",
            ratio=math.nan,
            failed=words,
        )


def _plus(one: Gradient | None, other: Gradient) -> Gradient:
    if one is None:
        return list(other)
    return [a + b for a, b in zip(one, other, strict=True)]


def _share(length: float, bound: float) -> float:
    if math.isnan(length):
        return math.inf
    if length == 0:
        return 0.0
    return length / bound if bound else math.inf


def _ratio(gradient: Gradient, full: Gradient) -> float:
    """The factor on the whole that comes closest to what was accumulated."""
    dots = [float((a * b.conj()).real.sum()) for a, b in zip(gradient, full, strict=True)]
    return math.fsum(dots) / norm(full) ** 2
