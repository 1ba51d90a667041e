"""Learning-rate range tests: bounds between which a rate is worth searching, from one short run.

`lr_range` sweeps and reads; `read_curves` reads curves made elsewhere.
"""

from .bounds import CeilingKind, Outcome
from .reading import Bound, Confidence, Curve, Reading, read_curves
from .sweep import RangeTest, lr_range

__all__ = [
    "Bound",
    "CeilingKind",
    "Confidence",
    "Curve",
    "Outcome",
    "RangeTest",
    "Reading",
    "lr_range",
    "read_curves",
]
