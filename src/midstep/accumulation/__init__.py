"""How the gradients of a window's microbatches are added up, where not by autograd's own sum."""

from .fused import Fused as Fused
from .stage import Accumulation as Accumulation
from .wide import Wide as Wide
