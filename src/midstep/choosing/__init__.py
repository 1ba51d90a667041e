"""Choices read off a log that is there: a clip threshold, and a batch size."""

from .batch import BatchAdvice, BatchChoice, advise_batch
from .threshold import Shadow, ThresholdAdvice, advise_threshold, shadow, usual_rules

__all__ = [
    "BatchAdvice",
    "BatchChoice",
    "Shadow",
    "ThresholdAdvice",
    "advise_batch",
    "advise_threshold",
    "shadow",
    "usual_rules",
]
