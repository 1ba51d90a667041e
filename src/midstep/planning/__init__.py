"""Planning: what fits, what it costs to make it fit, and whether that is so when it is run."""

from .peaks import Peak, peak_of, storage_bytes
from .tradeoff import Tradeoff, measure_tradeoff, parity

__all__ = ["Peak", "peak_of", "storage_bytes", "Tradeoff", "measure_tradeoff", "parity"]
