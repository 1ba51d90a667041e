"""Sums that need no model: the memory of a training state, effective batches, and decay."""

from .decay import DecayExponents, decay_factor, keep_exponent
from .effective import EffectiveBatch, RateAdvice, Scaling, scaled_rate
from .memory import Line, Memory, Sharded, State, lora_parameters, memory_of
from .optimizers import OPTIMIZERS, OptimizerKind
from .units import Dtype, parse_bytes, parse_count, show_bytes, show_count

__all__ = [
    "DecayExponents",
    "decay_factor",
    "keep_exponent",
    "EffectiveBatch",
    "RateAdvice",
    "Scaling",
    "scaled_rate",
    "Line",
    "Memory",
    "Sharded",
    "State",
    "lora_parameters",
    "memory_of",
    "OPTIMIZERS",
    "OptimizerKind",
    "Dtype",
    "parse_bytes",
    "parse_count",
    "show_bytes",
    "show_count",
]
