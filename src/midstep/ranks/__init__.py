"""All knowledge that other ranks exist: who they are, how they share a model, how they add up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from .opening import Opener
    from .parallel import Parallel
    from .sharded import Sharding
    from .sharing import Sharing
    from .world import World

__all__ = ["Ranks", "ranks_of"]


class Ranks:
    """The other ranks, as the updater knows them.

    Attributes:
        world: How this rank talks to the others.
        parallel: How they share the model.
        opener: How they open a window together.
        sharing: How the parts of a gradient make the whole.
    """

    __slots__ = ("opener", "parallel", "sharing", "world")

    def __init__(self, model: nn.Module, names: Sequence[str], sharding: Sharding | None) -> None:
        from .opening import Opener
        from .parallel import parallel_of
        from .sharing import Sharing
        from .world import World

        self.world: World = World()
        self.parallel: Parallel = parallel_of(model, self.world.size, sharding)
        self.opener: Opener = Opener(self.world, self.parallel)
        self.sharing: Sharing = Sharing(self.world, self.parallel, names)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Tell the other ranks of an error in here, or say which rank broke the collective."""
        try:
            with self.world.translated():
                yield
        except BaseException as error:
            self.world.fail(error)
            raise

    @property
    def copies(self) -> int:
        """How many ranks see the same data, as those that split tensors do."""
        return self.world.size // self.parallel.data_parallel_size


def ranks_of(model: nn.Module, names: Sequence[str], sharding: Sharding | None) -> Ranks | None:
    """Find the other ranks; None where the process group was never started.

    Raises:
        ValueError: Nothing would add up the gradients of several ranks, or nothing is sharded.
        NotImplementedError: The model is wrapped in FSDP1.
    """
    # Asked first, since the modules behind it take a second to import.
    if dist.is_available() and dist.is_initialized():
        return Ranks(model, names, sharding)
    if sharding is not None:
        raise ValueError(
            "`Updater(sharding=...)`: there is no process group, so nothing is sharded. Start it "
            "with torchrun and `fully_shard` the model, or leave `sharding` out."
        )
    return None
