"""How the gradients of a window's microbatches are added up, where not by autograd's own sum."""

from .fused import Fused
from .stage import Accumulation
from .wide import Wide

__all__ = ["Accumulation", "Fused", "Wide"]
