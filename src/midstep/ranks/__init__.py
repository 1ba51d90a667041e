"""All knowledge that other ranks exist: who they are, how they share a model, how they add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from .opening import Opener, Opening
    from .parallel import Parallel
    from .sharded import Sharding
    from .sharing import Sharing
    from .world import World

__all__ = ["Ranks", "ranks_of"]


class Cut(Protocol):
    """What must be known of a rank's part of a window."""

    @property
    def num_known(self) -> int | None:
        """How many microbatches there are."""
        ...

    @property
    def counts(self) -> Sequence[Mapping[str, float]] | None:
        """What each counts, by term; None when streamed."""
        ...


class Ranks:
    """The other ranks, as the updater knows them.

    Attributes:
        world: How this rank talks to the others.
        parallel: How they share the model.
        opener: How they open a window together.
        sharing: How the parts of a gradient make the whole.
    """

    __slots__ = ("_check_every", "_names", "_parameters", "opener", "parallel", "sharing", "world")

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        sharding: Sharding | None,
        check_every: int | None,
    ) -> None:
        from .opening import Opener
        from .parallel import parallel_of
        from .sharing import Sharing
        from .world import World

        self._names = list(names)
        self._parameters = list(parameters)
        self._check_every = check_every
        self.world: World = World()
        with self.world.failing():
            self.parallel: Parallel = parallel_of(model, self.world, sharding)
            self.opener: Opener = Opener(self.world, self.parallel)
            self.sharing: Sharing = Sharing(self.world, self.parallel, names, parameters)

    def failing(self) -> AbstractContextManager[None]:
        """Tell the other ranks of an error in here, or say which rank broke the collective."""
        return self.world.failing()

    def open(
        self, cut: Cut, *, has_cut: bool, syncs_late: bool, reruns: bool = False
    ) -> Opening | None:
        """Open a window on all ranks; None when no rank has a batch left.

        Args:
            cut: This rank's part of it.
            has_cut: Whether it has one, or an empty stand-in.
            syncs_late: Whether gradients are added up after the last backward, not in it.
            reruns: Whether ranks may run their parts again, each by itself.

        Raises:
            RankFailure: Another rank has failed, or is still in a window that this one left.
        """
        self.world.check()
        with self.failing():
            opening = self.opener.open(
                cut.num_known or 0,
                cut.counts,
                has_cut=has_cut,
                syncs_late=syncs_late,
                reruns=reruns,
            )
        if opening is not None:
            self.world.enter_window()
        return opening

    def leave(self) -> None:
        """Leave a window without a step; every rank must."""
        self.world.leave_window()
        self.parallel.discard()

    def check_replicas(self, step: int) -> None:
        """Compare the weights of replicas, when it is due after so many applied updates.

        Raises:
            ReplicaDrift: They differ.
        """
        if self._check_every is not None and step % self._check_every == 0:
            from .replicas import check_replicas

            check_replicas(self.world, self.parallel, self._names, self._parameters)

    def why_eager(self, p: float) -> str | None:
        """Say what the ranks must tell each other on the host when a window ends; None for nothing.

        Args:
            p: Order of the norm.
        """
        if not self.sharing.is_aligned or self.sharing.has_own:
            return "ranks step parameters that others do not have"
        if self.parallel.claims():
            return "DDP with `find_unused_parameters=True` learns from the host which were used"
        if self.sharing.has_parts and p != 2.0:
            return f"a norm of order {p:g} over parts that lie on several ranks is made on the host"
        if self._check_every is not None:
            return "`check_replicas_every` has the ranks meet after updates, when all know of them"
        return None

    def parts_here(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Give all that this window's backwards have left on this rank, without a collective."""
        from .locals import local_part

        grads = [p.grad for p in parameters if p.grad is not None]
        return [local_part(t) for t in (*grads, *self.parallel.hidden_gradients())]

    @property
    def copies(self) -> int:
        """How many ranks see the same data, as those that split tensors do."""
        return self.world.size // self.parallel.data_parallel_size


def ranks_of(
    model: nn.Module,
    names: Sequence[str],
    parameters: Sequence[Tensor],
    sharding: Sharding | None,
    check_every: int | None,
) -> Ranks | None:
    """Find the other ranks; None where the process group was never started.

    Args:
        model: Wrapped, sharded or split.
        names: Of the parameters.
        parameters: What the optimizer steps.
        sharding: What FSDP2 trades.
        check_every: After how many applied updates replicas are compared; None for never.

    Raises:
        ValueError: `check_every` is below 1, nothing would add up the gradients of several ranks,
            or nothing is sharded.
        NotImplementedError: The model is wrapped in FSDP1.
    """
    if check_every is not None and (isinstance(check_every, bool) or not check_every >= 1):
        raise ValueError(
            f"`Updater(check_replicas_every={check_every!r})`: must be a number of updates of at "
            "least 1, or None to never compare."
        )
    # Asked first, since the modules behind it take a second to import.
    if dist.is_available() and dist.is_initialized():
        return Ranks(model, names, parameters, sharding, check_every)
    if sharding is not None:
        raise ValueError(
            "`Updater(sharding=...)`: there is no process group, so nothing is sharded. Start it "
            "with torchrun and `fully_shard` the model, or leave `sharding` out."
        )
    return None
