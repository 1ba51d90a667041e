"""Clipping: when it came, of what, and what it returned."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...findings import Finding
from ..events import Backward, Clear, Clip, Collective, Place, ScalerStep, Step, Unscale
from ..history import History, Update
from ..source import drops_result, is_tried
from .making import make

__all__ = ["check_clipping"]


def check_clipping(history: History) -> Iterator[Finding]:
    """Find clips that came at the wrong time or saw the wrong gradients.

    Args:
        history: Of one process.
    """
    for _, clip in history.of_kind(Clip):
        if not clip.is_look:
            yield from _alone(history, clip)
    for update in history.all_updates():
        clips = history.clips_of(update)
        real = [(index, clip) for index, clip in clips if bounds(clip)]
        yield from _every_microbatch(update, real)
        yield from _before_unscale(history, update, real)
        yield from _before_sum(history, update, real)
        yield from _look_after(update, clips)
        yield from _subset(history, update, [clip for _, clip in real])
    yield from _useless(history)


def bounds(clip: Clip) -> bool:
    """Whether a clip changes gradients at all."""
    return not clip.is_look and math.isfinite(clip.limit)


def _alone(history: History, clip: Clip) -> Iterator[Finding]:
    """What one clip shows by itself."""
    if clip.limit == 0:
        yield make(
            "MS211", clip.place, "The threshold is `0`, so every gradient became `0`.", {"limit": 0}
        )
    if clip.was_iterator and clip.num_given == 0:
        yield make(
            "MS207",
            clip.place,
            f"The iterator gave `0` parameters; the norm was `{clip.norm:g}`.",
            {"num_given": 0},
        )
    if clip.is_local and bounds(clip):
        yield make(
            "MS208",
            clip.place,
            f"The norm `{clip.norm:.4g}` is that of the shards of rank `{history.recording.rank}` "
            f"of `{history.recording.world_size}`.",
            {"norm": clip.norm, "rank": history.recording.rank},
        )
    if math.isinf(clip.norm) and clip.all_finite:
        yield make(
            "MS210",
            clip.place,
            f"The norm of `{clip.num_given}` finite gradients was `{clip.norm:g}`, and the clip "
            "made all of them `0`.",
            {"num_given": clip.num_given},
        )
    if clip.by == "norm" and not clip.raises and bounds(clip) and is_tried(clip.place):
        yield make(
            "MS602",
            clip.place,
            "It stands in a `try` for `RuntimeError`, and `error_if_nonfinite` is `False`.",
        )


def _every_microbatch(update: Update, clips: list[tuple[int, Clip]]) -> Iterator[Finding]:
    if len(update.backwards) < 2:
        return
    first, last = update.backwards[0], update.backwards[-1]
    inside = [
        (index, clip)
        for index, clip in clips
        if first[0] < index < last[0] and clip.params & first[1].params
    ]
    if not inside or first[1].route != last[1].route:
        return
    after = [clip for index, clip in clips if index > last[0]]
    place = inside[0][1].place
    if after:
        yield make(
            "MS201",
            place,
            f"`{len(inside) + len(after)}` clips in a window of `{len(update.backwards)}` "
            "microbatches; the first one shrank a part of the sum.",
            {"num_clips": len(inside) + len(after), "num_microbatches": len(update.backwards)},
        )
    else:
        yield make(
            "MS205",
            place,
            f"`{len(inside)}` clips in a window of `{len(update.backwards)}` microbatches, and "
            "none after the last backward.",
            {"num_clips": len(inside)},
        )


def _before_unscale(
    history: History, update: Update, clips: list[tuple[int, Clip]]
) -> Iterator[Finding]:
    if not update.backwards or not isinstance(update.event, ScalerStep):
        return
    index_of_last, last = update.backwards[-1]
    if last.scaler is None or last.scale == 1.0:
        return
    unscaled = [
        index
        for index, event in history.between(index_of_last, update.last, Unscale)
        if event.optimizer == update.optimizer
    ]
    for index, clip in clips:
        # A threshold that was multiplied by the scale is right.
        is_scaled_too = clip.limit >= last.scale > 1.0
        if index > index_of_last and not any(u < index for u in unscaled) and not is_scaled_too:
            true_norm = clip.norm / last.scale
            yield make(
                "MS202",
                clip.place,
                f"The gradients carried the scale `{last.scale:g}`: the norm `{clip.norm:.4g}` is "
                f"`{true_norm:.4g}` unscaled, and the threshold is `{clip.limit:g}`.",
                {"norm": clip.norm, "scale": last.scale, "limit": clip.limit},
            )


def _before_sum(
    history: History, update: Update, clips: list[tuple[int, Clip]]
) -> Iterator[Finding]:
    sums = [
        (index, event)
        for index, event in history.between(update.first, update.last, Collective)
        if event.params
    ]
    for index, clip in clips:
        later = [event for at, event in sums if at > index and event.params & clip.params]
        unsynced = [
            at
            for at, _ in update.backwards
            if at < index and history.forward_syncs.get(at) is False
        ]
        syncs_later = [
            at for at, _ in update.backwards if at > index and history.forward_syncs.get(at)
        ]
        if later or (unsynced and syncs_later):
            how = f"`{later[0].name}` of the gradients" if later else "the backward that sums"
            yield make(
                "MS203",
                clip.place,
                f"Rank `{history.recording.rank}` clipped its own gradient, of norm "
                f"`{clip.norm:.4g}`, before {how}.",
                {"norm": clip.norm, "rank": history.recording.rank},
            )


def _look_after(update: Update, clips: list[tuple[int, Clip]]) -> Iterator[Finding]:
    """Norms of gradients that a clip has shortened, taken whole or parameter by parameter."""
    if not update.backwards:
        return
    fired: Clip | None = None
    looks: dict[Place | None, list[Clip]] = {}
    for index, clip in clips:
        if index < update.backwards[-1][0]:
            continue
        if not bounds(clip):
            looks.setdefault(clip.place, []).append(clip)
        elif clip.by == "norm":
            fired = clip if clip.norm > clip.limit and drops_result(clip.place) else None
            looks.clear()
    for place, parts in looks.items() if fired is not None else ():
        norm = math.hypot(*(part.norm for part in parts))
        seen = frozenset[int]().union(*(part.params for part in parts))
        if fired is not None and seen == fired.params and norm <= fired.limit * 1.001:
            yield make(
                "MS209",
                place,
                f"It gave `{norm:.4g}`, the threshold; before the clip the norm was "
                f"`{fired.norm:.4g}`.",
                {"norm_after": norm, "norm_before": fired.norm, "limit": fired.limit},
            )


def _subset(history: History, update: Update, clips: list[Clip]) -> Iterator[Finding]:
    if not update.params or not update.backwards or history.optimizers[update.optimizer].is_sharded:
        return
    clipped = frozenset[int]().union(*(clip.params for clip in clips)) & update.params
    missing = update.params - clipped
    if not clipped or not missing:
        return
    given = frozenset[int]().union(*(clip.given for clip in clips))
    if missing <= given:
        return
    yield make(
        "MS206",
        clips[-1].place,
        f"`{len(clipped)}` of the `{len(update.params)}` parameters that the optimizer stepped "
        "were clipped.",
        {"num_clipped": len(clipped), "num_stepped": len(update.params)},
    )


def _useless(history: History) -> Iterator[Finding]:
    """Clips after which nothing used what they clipped."""
    by_place: dict[Place | None, list[tuple[int, Clip]]] = {}
    for index, clip in history.of_kind(Clip):
        if bounds(clip) and clip.given and clip.inside is None:
            by_place.setdefault(clip.place, []).append((index, clip))
    for place, clips in by_place.items():
        if not all(_is_used_up(history, index, clip) for index, clip in clips):
            continue
        index, clip = clips[0]
        earlier = [e for _, e in history.between(0, index, Step) if e.params & clip.given]
        code = "MS204" if earlier else "MS205"
        norms = ", ".join(f"{c.norm:.3g}" for _, c in clips[:4])
        what = "had been stepped already" if earlier else "did not exist yet"
        yield make(
            code,
            place,
            f"In all of `{len(clips)}` calls the gradients {what}; it returned `{norms}`.",
            {"num_clips": len(clips)},
        )


def _is_used_up(history: History, index: int, clip: Clip) -> bool:
    """Whether no backward came for these parameters between the last step, or clearing, and a clip.

    Without any step or backward before or after it, a clip tells nothing.
    """
    for at in range(index - 1, -1, -1):
        event = history.events[at]
        if isinstance(event, Backward) and event.params & clip.given:
            return False
        if isinstance(event, Step) and event.params & clip.given:
            return _clears_before_step(history, index, clip)
    return any(
        event.params & clip.given
        for _, event in history.between(index, len(history.events), Backward)
    )


def _clears_before_step(history: History, index: int, clip: Clip) -> bool:
    """Whether what was clipped is not stepped again before the next backward or clearing."""
    for event in history.events[index + 1 :]:
        if isinstance(event, Step) and event.params & clip.given:
            return False
        if isinstance(event, Backward | Clear) and event.params & clip.given:
            return True
    return True
