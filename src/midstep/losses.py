"""Loss sums: the numerator of a mean loss, carrying what it is a sum over.

A mean cannot be added to another mean; a sum can. So everything here returns the sum and its count
and leaves the one division to the window, which alone knows the denominator.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["LossSum", "cross_entropy"]


@dataclasses.dataclass(frozen=True, slots=True)
class LossSum:
    """The sum of a loss over its targets, and how many targets (or how much weight) that is.

        loss_mean = sum over microbatches and ranks of `sum` / the same sum of `count`

    In a streamed window the count becomes part of the denominator. In a counted window it is
    checked against what the window counted, so that a loss and its count cannot part unnoticed.

    Attributes:
        sum: The summed loss. Shape [], with a graph.
        count: Targets, rows, elements, or a sum of weights; a number, or a tensor of shape [].
            Reading a tensor that lives on an accelerator is one host sync.

    Example:
        >>> LossSum(torch.tensor(6.0), 3).mean()
        tensor(2.)
    """

    sum: Tensor
    count: float | Tensor

    @classmethod
    def from_mean(cls, loss_mean: Tensor, count: float | Tensor) -> LossSum:
        """Take back the division that a model or a `reduction="mean"` has already made.

            sum = loss_mean * count

        A mean over nothing is 0/0; with a count of 0 the window leaves such a microbatch out of
        backward altogether, so its nan goes nowhere.

        Args:
            loss_mean: What the model returned. Shape [].
            count: What that mean was over; shift, mask and class weights included.

        Example:
            >>> LossSum.from_mean(torch.tensor(2.0), 3).sum
            tensor(6.)
        """
        return cls(loss_mean * count, count)

    def mean(self) -> Tensor:
        """Give the mean over this microbatch alone, for a look; never a training loss."""
        return self.sum.detach() / self.count


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    shift: bool = False,
) -> LossSum:
    """Sum the cross entropy over the targets and count them as torch's own mean would.

        sum = sum over targets of loss,   count = number of targets, or with class weights the sum
        of weight[label] over them: torch's `reduction="mean"` is exactly sum / count.

    bf16 and fp16 logits are taken to float32 first: a sum over thousands of targets does not fit in
    8 or 11 bits. Costs one float32 copy of such logits; no host sync.

    Args:
        logits: Scores. Shape [..., num_classes], or torch's [rows, num_classes, d1, ...] when that
            is what fits `labels`; where both fit, the last dimension holds the classes.
        labels: Class indices, shape [...]; or class probabilities, the shape of `logits`, which are
            all counted.
        ignore_index: The label that is no target.
        weight: One weight a class. Shape [num_classes].
        label_smoothing: In [0, 1]; torch's definition, denominator included.
        shift: Causal shift: position t is scored against the label at t + 1, the last position and
            the first label drop out. Only for [..., time, num_classes] logits.

    Raises:
        ValueError: The shapes fit no layout.

    Example:
        >>> logits, labels = torch.zeros(3, 4), torch.tensor([1, -100, 2])
        >>> loss = cross_entropy(logits, labels)
        >>> round(loss.sum.item(), 4), loss.count.item()
        (2.7726, 2)
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if weight is not None:
        weight = weight.to(logits.dtype)  # what torch asks for, also of widened logits
    if shift:
        if logits.ndim < 2 or labels.shape[: logits.ndim - 1] != logits.shape[:-1]:
            raise _shape_error(logits, labels, shift=True)
        logits = logits[..., :-1, :]
        labels = labels[..., 1:] if labels.ndim == logits.ndim - 1 else labels[..., 1:, :]
    if labels.is_floating_point() and labels.shape == logits.shape:
        scores, targets = logits.flatten(0, -2), labels.flatten(0, -2).to(logits.dtype)
        total = F.cross_entropy(
            scores, targets, weight=weight, reduction="sum", label_smoothing=label_smoothing
        )
        return LossSum(total, scores.shape[0])
    if labels.shape == logits.shape[:-1]:
        scores, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    elif logits.ndim > 2 and labels.shape == logits.shape[:1] + logits.shape[2:]:
        scores, targets = logits, labels
    else:
        raise _shape_error(logits, labels, shift=False)
    total = F.cross_entropy(
        scores,
        targets,
        weight=weight,
        ignore_index=ignore_index,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    is_target = targets != ignore_index
    if weight is None:
        return LossSum(total, is_target.sum())
    # float64, as the window's own count is: float32 sums of many weights part in the sixth digit.
    return LossSum(total, weight.double()[targets[is_target]].sum())


def _shape_error(logits: Tensor, labels: Tensor, *, shift: bool) -> ValueError:
    wanted = "[..., time]" if shift else "[...] or torch's [rows, d1, ...]"
    return ValueError(
        f"`cross_entropy(shift={shift})`: labels of shape {list(labels.shape)} do not fit logits "
        f"of shape {list(logits.shape)}, so targets and scores would be paired wrongly. Pass "
        f"logits of shape [..., num_classes] and labels of shape {wanted}."
    )
