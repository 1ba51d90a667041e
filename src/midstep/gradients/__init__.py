"""The gradients of one update: their norm, their non-finite entries, and the one factor on them."""

from .memory import editable as editable
from .memory import values_of as values_of
from .norms import Norms as Norms
from .norms import combined_norm as combined_norm
from .norms import num_nonfinite as num_nonfinite
from .norms import tensor_norms as tensor_norms
from .norms import unread_norms as unread_norms
from .norms import wide_dtype as wide_dtype
from .pending import Gradients as Gradients
from .pending import multiply_ as multiply_
from .shared import SharedGradients as SharedGradients
