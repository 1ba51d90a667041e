"""Reference forms in plain NumPy: accumulation, training and schedules, as they are learnt.

Each is its formula and nothing else: no torch, no speed, no options. They are what the rest of the
package is held against, and short enough to be held against a page of paper.

The schedules count t from 0, where the rate of a warm-up is 0 and that of a decay its base. An
update must do something, so the schedules of `midstep.schedules` have at update s (from 0) the rate
that is written here for t = s + 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "accumulate",
    "cosine_decay",
    "linear_warmup",
    "loss_mean",
    "output_head_gradient",
    "train",
    "warmup_cosine",
]

Array: TypeAlias = npt.NDArray[Any]


def output_head_gradient(
    hidden: Array, weight: Array, labels: Array, *, ignore_index: int = -100
) -> tuple[Array, int]:
    """Differentiate the mean cross entropy of an output head by its weight.

        gradient = hidden^T (softmax(hidden weight) - onehot(labels)) / n

    over the n rows whose label is a target. Without a target the gradient is zero and n is 0.

    Args:
        hidden: What the head reads. Shape [rows, width].
        weight: Of the head, without a bias. Shape [width, num_classes].
        labels: Class indices. Shape [rows].
        ignore_index: The label that is no target.

    Returns:
        The gradient, of the shape of `weight`, and n.

    Example:
        >>> hidden, weight = np.array([[1.0, 0.0]]), np.zeros((2, 2))
        >>> gradient, n = output_head_gradient(hidden, weight, np.array([1]))
        >>> gradient.tolist(), n
        ([[0.5, -0.5], [0.0, 0.0]], 1)
    """
    is_target = labels != ignore_index
    rows, targets = hidden[is_target], labels[is_target]
    n = int(is_target.sum())
    error = _softmax(rows @ weight)
    error[np.arange(n), targets] -= 1.0
    return rows.T @ error / max(n, 1), n


def loss_mean(hidden: Array, weight: Array, labels: Array, *, ignore_index: int = -100) -> float:
    """Give the mean cross entropy that `output_head_gradient` differentiates.

    Args:
        hidden: What the head reads. Shape [rows, width].
        weight: Of the head. Shape [width, num_classes].
        labels: Class indices. Shape [rows].
        ignore_index: The label that is no target.

    Example:
        >>> round(loss_mean(np.ones((1, 2)), np.zeros((2, 4)), np.array([3])), 4)
        1.3863
    """
    is_target = labels != ignore_index
    probability = _softmax(hidden[is_target] @ weight)
    picked = probability[np.arange(len(probability)), labels[is_target]]
    return float(-np.log(picked).mean())


def accumulate(gradients: Iterable[Array], counts: Sequence[float] | None = None) -> Array:
    """Join the mean gradients of microbatches to that of all their rows at once.

        gradient = sum of n_i * gradient_i / sum of n_i

    With equal counts that is their mean; their sum would be as many times too long as there are.

    Args:
        gradients: Of each microbatch's mean loss, all of one shape.
        counts: What each mean is over; None where all are over equally many.

    Raises:
        ValueError: Nothing was counted, or there is not one count for each gradient.

    Example:
        >>> accumulate([np.array([1.0]), np.array([4.0])], counts=[2, 1]).tolist()
        [2.0]
    """
    parts = list(gradients)
    weights = [1.0] * len(parts) if counts is None else list(counts)
    if len(parts) != len(weights) or not sum(weights):
        raise ValueError(
            f"`accumulate`: {len(parts)} gradients with counts {weights}: the mean over nothing is "
            "0/0, and each gradient needs its own count. Give one count for each."
        )
    total = sum(n * gradient for n, gradient in zip(weights, parts, strict=True))
    joined: Array = np.asarray(total) / sum(weights)
    return joined


def train(
    weight: Array,
    microbatches: Iterable[tuple[Array, Array]],
    *,
    lr: float,
    size: int,
    ignore_index: int = -100,
) -> Array:
    """Train an output head by SGD, one step for each window of microbatches.

        weight <- weight - lr * (gradient of the window's mean loss)

    The weight is the same for all microbatches of a window; the last window may be short and has
    its own denominator; one without a target makes no step.

    Args:
        weight: To begin with; left as it is. Shape [width, num_classes].
        microbatches: Pairs of hidden [rows, width] and labels [rows].
        lr: The rate.
        size: Microbatches in a window.
        ignore_index: The label that is no target.

    Returns:
        The trained weight.

    Example:
        >>> rows = (np.array([[1.0, 0.0]]), np.array([1]))
        >>> train(np.zeros((2, 2)), [rows, rows], lr=1.0, size=2).tolist()
        [[-0.5, 0.5], [0.0, 0.0]]
    """
    weight = weight.copy()
    window: list[tuple[Array, int]] = []
    stream = list(microbatches)
    for position, (hidden, labels) in enumerate(stream, start=1):
        window.append(output_head_gradient(hidden, weight, labels, ignore_index=ignore_index))
        if position % size == 0 or position == len(stream):
            counts = [n for _, n in window]
            if sum(counts):
                weight -= lr * accumulate((gradient for gradient, _ in window), counts)
            window = []
    return weight


def linear_warmup(t: int, *, base: float, warmup: int) -> float:
    """Rise in a straight line: `base * min(t, warmup) / warmup`.

    Args:
        t: From 0.
        base: The rate it rises to.
        warmup: Where it gets there.

    Example:
        >>> [linear_warmup(t, base=1.0, warmup=4) for t in range(6)]
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return base * min(t, warmup) / warmup


def cosine_decay(t: int, *, base: float, minimum: float, total: int) -> float:
    """Fall along half a cosine: `minimum + (base - minimum) * (1 + cos(pi t / total)) / 2`.

    Args:
        t: From 0; after `total` the rate stays at the minimum.
        base: The rate at 0.
        minimum: The rate at `total`.
        total: The length of the fall.

    Example:
        >>> [round(cosine_decay(t, base=0.3, minimum=0.01, total=20), 3) for t in (0, 10, 20)]
        [0.3, 0.155, 0.01]
    """
    return minimum + (base - minimum) * (1 + math.cos(math.pi * min(t, total) / total)) / 2


def warmup_cosine(t: int, *, base: float, minimum: float, warmup: int, total: int) -> float:
    """Rise in a straight line, then fall along half a cosine, counted from the end of the rise.

    Args:
        t: From 0.
        base: The rate at `warmup`.
        minimum: The rate at `total` and after it.
        warmup: The length of the rise.
        total: The length of both together.

    Example:
        >>> [warmup_cosine(t, base=1.0, minimum=0.0, warmup=2, total=6) for t in (0, 1, 2, 4, 6)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if t < warmup:
        return linear_warmup(t, base=base, warmup=warmup)
    return cosine_decay(t - warmup, base=base, minimum=minimum, total=total - warmup)


def _softmax(scores: Array) -> Array:
    shifted: Array = np.exp(scores - scores.max(axis=1, keepdims=True))
    normalised: Array = shifted / shifted.sum(axis=1, keepdims=True)
    return normalised
