"""Clip rules: bound the gradient of an update, once it is accumulated, unscaled and finite."""

from .adaptive import Adaptive as Adaptive
from .average import ByTensorAverage as ByTensorAverage
from .chain import Chain as Chain
from .functions import clip_grad_norm_ as clip_grad_norm_
from .functions import clip_grad_value_ as clip_grad_value_
from .functions import total_norm as total_norm
from .norm import ByGlobalNorm as ByGlobalNorm
from .norm import ByGroupNorm as ByGroupNorm
from .norm import ByTensorNorm as ByTensorNorm
from .quantile import ByQuantile as ByQuantile
from .rms import ByRms as ByRms
from .rule import Attempt as Attempt
from .rule import Decision as Decision
from .rule import Rule as Rule
from .spike import SkipSpike as SkipSpike
from .value import ByValue as ByValue
from .zscore import ByZScore as ByZScore
