"""Settings that hold for every test."""

import os

# Before torch is imported. Two worker processes on two cores: more threads would only take turns,
# and with one thread a sum has one order.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings  # after the line above, in case it ever imports numpy

# The same examples on every run, so that a red run is red again; no deadline, because a busy
# machine is not a fault.
settings.register_profile("midstep", derandomize=True, deadline=None)
settings.load_profile("midstep")
