"""From epochs and batches to applied updates, once, before training."""

from .checks import whole_number


def updates_per_epoch(num_batches: int, size: int, *, drop_tail: bool = False) -> int:
    """Count the updates that one pass over the data makes, for `total = epochs * ...`.

        ceil(num_batches / size)   the short last window makes an update of its own
        floor(num_batches / size)  with `drop_tail`

    A window does not reach into the next epoch, so it is rounded for each epoch and not for all
    of them. The count is of windows: whatever is skipped later makes fewer applied updates.

    Args:
        num_batches: Batches that the loader of one rank gives in an epoch; `len(loader)`.
        size: Batches in a window, which is one update.
        drop_tail: Whether the short last window is dropped.

    Returns:
        Updates in an epoch, at least 1.

    Raises:
        ValueError: The epoch would make no update at all.

    Example:
        >>> updates_per_epoch(13, 4), updates_per_epoch(13, 4, drop_tail=True)
        (4, 3)
        >>> 3 * updates_per_epoch(13, 4)  # not ceil(3 * 13 / 4) = 10
        12
    """
    num_batches = whole_number("num_batches", num_batches, at_least=1)
    size = whole_number("size", size, at_least=1)
    if drop_tail and num_batches < size:
        raise ValueError(
            f"`updates_per_epoch({num_batches}, {size}, drop_tail=True)` is 0, because the only "
            "window is short and dropped, so nothing would ever be trained. Lower `size`, or keep "
            "the tail."
        )
    return num_batches // size if drop_tail else -(-num_batches // size)
