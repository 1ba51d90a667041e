"""Planning: what fits, what it costs to make it fit, and whether that is so when it is run."""

from .budget import recompute_within
from .peaks import Peak, peak_of, storage_bytes
from .planner import plan
from .result import Checked, Plan
from .tradeoff import Tradeoff, measure_tradeoff, parity
from .ways import Way

__all__ = [
    "Peak",
    "peak_of",
    "storage_bytes",
    "plan",
    "Checked",
    "Plan",
    "Tradeoff",
    "measure_tradeoff",
    "parity",
    "recompute_within",
    "Way",
]
