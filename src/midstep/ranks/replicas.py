"""Replicas: whether ranks that must hold the same weights still do.

A rank drifts when it steps on another gradient than its twins, or when memory or a kernel went
wrong. Nothing fails then, and the loss looks much as it did.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import ReplicaDrift
from .fingerprint import fingerprint
from .parallel import Parallel
from .world import World

__all__ = ["check_replicas"]

# Where the numbers of a parameter lie: ranks with an equal place hold the same ones.
Place: TypeAlias = str
Marks: TypeAlias = Mapping[Place, Mapping[str, int]]


def check_replicas(
    world: World, parallel: Parallel, names: Sequence[str], parameters: Sequence[Tensor]
) -> None:
    """Compare the weights of ranks that hold the same ones, to the last bit.

    Costs a read of the weights and one small gather; two where ranks differ.

    Args:
        world: The ranks.
        parallel: Which parameters are a rank's own; they are compared with nobody's.
        names: Of the parameters.
        parameters: What this rank steps.

    Raises:
        ReplicaDrift: Ranks differ. Every rank raises it.
    """
    marks: dict[Place, dict[str, int]] = {}
    for name, parameter in zip(names, parameters, strict=True):
        if not parallel.is_own(parameter):
            marks.setdefault(_place(parameter), {})[name] = fingerprint(parameter)
    # Ranks that step different parameters share no place.
    marks = {f"{place} {_digest(sorted(found))}": found for place, found in marks.items()}
    brief = {place: {"": _digest(sorted(found.items()))} for place, found in marks.items()}
    if _strangers(world.gather_objects(brief)):
        error = _drift(_strangers(world.gather_objects(marks)))
        raise error


def _place(parameter: Tensor) -> Place:
    if not isinstance(parameter, DTensor):
        return "everywhere"
    where: Sequence[int] = parameter.device_mesh.get_coordinate() or ()
    split = [
        f"{axis}:{where[axis]}"
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    ]
    return f"{list(parameter.device_mesh.shape)} {split}"


def _digest(values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def _strangers(everyone: Sequence[Marks]) -> dict[str, tuple[list[int], bool]]:
    """Find the ranks that differ from most of their twins, by parameter; True for no majority."""
    found: dict[str, tuple[list[int], bool]] = {}
    for place in {place: None for marks in everyone for place in marks}:
        members = {rank: marks[place] for rank, marks in enumerate(everyone) if place in marks}
        for name in next(iter(members.values())):
            values = {rank: marks[name] for rank, marks in members.items()}
            votes = collections.Counter(values.values()).most_common(2)
            if len(votes) == 1:
                continue
            is_tie = votes[0][1] == votes[1][1]
            # The first counted of equals is the lowest rank's.
            others = [rank for rank, value in values.items() if value != votes[0][0]]
            ranks, was_tie = found.get(name, ([], False))
            found[name] = (sorted({*ranks, *others}), was_tie or is_tie)
    return found


def _drift(strangers: Mapping[str, tuple[list[int], bool]]) -> ReplicaDrift:
    name, (ranks, is_tie) = next(iter(strangers.items()))
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    how = (
        f"differ{'s' * (len(ranks) == 1)} from the lowest rank with the same weights, and there "
        "is no majority to tell which is right"
        if is_tie
        else f"differ{'s' * (len(ranks) == 1)} from most ranks with the same weights"
    )
    return ReplicaDrift(
        f"Replicas have drifted: {who} {how}, first in `{name}` ({len(strangers)} parameters in "
        "all). They train as several models and their gradients no longer belong together. Go on "
        "from a checkpoint written before, and look for what only some ranks do: a change to "
        "weights or gradients, a seed, failing memory.",
        ranks=ranks,
        parameter=name,
    )
