"""Verifying: a certificate that accumulated gradients are those of the whole batch, or why not.

    borrowing -> subject -> rounding, draws, updates -> examination -> scale, layers, meeting
      -> numbers, diagnosis -> certificate

The name of the package is not `verify`, because that is the name of the function.
"""

from __future__ import annotations

from .certificate import Certificate, Comparison, Control, Outcome, Reason, ReasonKind
from .checking import verify

__all__ = ["Certificate", "Comparison", "Control", "Outcome", "Reason", "ReasonKind", "verify"]
