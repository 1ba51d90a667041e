"""The gradient noise scale: how many targets an update can use before more of them stop helping."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..gradients import Gradients
from .estimate import NoiseEstimate
from .measures import wide
from .microbatches import refuse_sharded
from .observer import Observer, OpenWindow, Reading, Subject

__all__ = ["NoiseScale"]

_MOST = 1_000  # windows that wait on an accelerator for somebody who reads a record


class NoiseScale(Observer):
    r"""Add the gradient noise scale, smoothed, with a 95 % interval.

        B = tr(Sigma) / ||G||^2

    Sigma is the covariance of one target's gradient, G the true gradient. Windows of far fewer
    targets than B gain almost in proportion when they grow; windows of far more gain next to
    nothing. Estimated from how far the microbatches of a window lie apart, without bias also when
    they are of unequal size (n_k of N targets, gradients g_k of their own mean loss, g of the
    window's):

        tr(Sigma) ~ (sum over k of n_k * ||g_k||^2 - N * ||g||^2) / (K - 1)
        ||G||^2 ~ ||g||^2 - tr(Sigma) / N

    Both are averaged over observed updates before they are divided. The interval is that of a
    ratio (Fieller 1954), from how much the averaged values scatter; its upper end is inf while
    ||G||^2 cannot be told from 0. Fields: `noise_scale` x, `noise_scale_low`, `noise_scale_high`,
    and `noise_scale_unit`, what x counts. Adds nothing in a window of one microbatch, and no
    interval in the first.

    Takes microbatches for independent draws. Targets of one row are not, which makes B larger, as
    it should be: it says what windows cut in this way gain. With several loss terms the counts are
    the first one's.

    Costs what `Microbatches` costs, and beside it nothing more; on several ranks one small
    collective. On an accelerator the averages are brought up to date when a record is read.

    Args:
        every: Look at updates `every`, `2 * every` and so on.
        window: Observed updates after which one counts a third as much as the newest; at least 2.
        unit: What the denominator counts, in words.

    Raises:
        ValueError: `every` is below 1 or `window` below 2.
        NotImplementedError: (when the updater is made) Parameters are in parts on several ranks.

    Example:
        >>> import midstep as ms
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.0),
        ...     observers=[NoiseScale(unit="rows")])
        >>> batches = [torch.tensor([[x]]) for x in (4.0, 6.0)]  # mean 5, variance 2
        >>> record = updater.update(batches, lambda model, x: model(x).sum(), count=ms.rows())
        >>> record.extra["noise_scale"], record.extra["noise_scale_unit"]  # 2 / (25 - 2 / 2)
        (0.0833..., 'rows')

    Reference: McCandlish, Kaplan, Amodei et al. 2018, arXiv:1812.06162, appendix A.1.
    """

    watches_microbatches = True

    def __init__(self, *, every: int = 1, window: int = 50, unit: str = "targets") -> None:
        super().__init__(every=every)
        if isinstance(window, bool) or not window >= 2:
            raise ValueError(
                f"`NoiseScale(window={window!r})`: must be at least 2 updates, since one shows no "
                "scatter."
            )
        self.unit = unit
        self._estimate = NoiseEstimate(window)
        self._subject: Subject | None = None
        self._square: float | None = None
        self._waiting: deque[_Waiting] = deque()

    def attach(self, subject: Subject) -> None:
        """Refuse parameters that lie in parts.

        Raises:
            NotImplementedError: They do.
        """
        refuse_sharded(subject, "NoiseScale")

    def begin(self, subject: Subject, window: OpenWindow, started: float) -> None:
        """Open the tap."""
        self._subject, self._square = subject, None
        subject.open_tap(window)

    def after_backward(self, index: int) -> None:
        """Note what flowed in."""
        assert self._subject is not None
        self._subject.tap.take(index)

    def on_gradients(self, gradients: Gradients) -> None:
        """Measure the gradient of the whole window."""
        assert self._subject is not None
        self._subject.tap.shut()
        self._square = gradients.norm(2.0) ** 2

    def read(self) -> Iterable[Reading]:
        """Take the window into the averages, and give what they say."""
        assert self._subject is not None
        if self._square is None:
            return
        flows = [flow for flow in self._subject.tap.flows if flow.count]
        own = [(flow.count, flow.own_norm) for flow in flows]
        # What cannot be known makes the sum nan, on all ranks, and is left out there.
        squares = [n * norm * norm if norm is not None else float("nan") for n, norm in own]
        total, num = sum(flow.count for flow in flows), float(len(flows))
        numbers: Sequence[float] | Tensor
        square_sum = sum(squares)
        if isinstance(square_sum, Tensor):
            device = square_sum.device
            known = torch.tensor([total, num], dtype=wide(device)).to(device, non_blocking=True)
            numbers = torch.cat([square_sum.view(1), known])
        else:
            numbers = [square_sum, total, num]
        if self._subject.ranks is not None:
            numbers = self._subject.ranks.world.sums([numbers])[0]
        waiting = _Waiting(numbers, self._square)
        self._waiting.append(waiting)
        if not isinstance(numbers, Tensor) or numbers.is_cpu or len(self._waiting) > _MOST:
            self._catch_up()
            yield Reading((), lambda _: waiting.fields)
        else:
            yield Reading(self._catch_up, lambda _: waiting.fields)

    def end(self) -> None:
        """Close the tap."""
        if self._subject is not None:
            self._subject.tap.close()
        self._subject = None

    def state_dict(self) -> dict[str, Any]:
        """Give the averages."""
        self._catch_up()
        return self._estimate.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the averages of an earlier run."""
        self._waiting.clear()
        self._estimate.load_state_dict(state)

    def _catch_up(self) -> Sequence[float]:
        """Take all windows that were observed into the averages, in their order."""
        while self._waiting:
            waiting = self._waiting.popleft()
            numbers = waiting.numbers
            square_sum, total, num = numbers.tolist() if isinstance(numbers, Tensor) else numbers
            if self._estimate.add(square_sum, waiting.square, total, round(num)):
                waiting.fields = {**self._estimate.fields(), "noise_scale_unit": self.unit}
        return ()


@dataclasses.dataclass(slots=True)
class _Waiting:
    """A window that is not in the averages yet."""

    numbers: Sequence[float] | Tensor
    square: float
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
