"""What a schedule is: a step goes in, the factor of the base rate comes out."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import SupportsIndex, TypeAlias

from .checks import whole_number

Factor: TypeAlias = Callable[[int], float]  # any function of the step, also one that is not ours


class Schedule(ABC):
    """Give the factor by which the base rate is multiplied on a step.

    Every schedule of this package is a frozen value: it depends on its arguments and the step
    alone, can be compared and pickled, and prints what it is made of. It fits `LambdaLR` as it is,
    whose checkpoint then holds the number of the step and nothing of the schedule: on resuming,
    the schedule is the one that the code names.
    """

    # No `__slots__` here, though every subclass has them: `LambdaLR.state_dict` copies `__dict__`
    # of a callable object, and `load_state_dict` writes into it. So there is one, and it is empty:
    # a checkpoint holds no class that `torch.load` would refuse, and changes no frozen value.

    def __call__(self, step: SupportsIndex) -> float:
        """Return the factor for the update that is made after `step` applied ones."""
        return self._factor(whole_number("step", step))

    @abstractmethod
    def _factor(self, step: int) -> float: ...
