"""Waiting: what a thread of torch does when it has nothing to do."""

from __future__ import annotations

import os
import sys

__all__ = ["sleep_while_waiting"]


def sleep_while_waiting() -> None:
    """Have idle threads sleep, where the environment does not say otherwise. Before torch loads.

    By default an idle thread of OpenMP spins, which is fastest on a machine of one's own and worst
    on a shared one: there it spins away the time of the thread it waits for. On 2 cores with 6
    other busy processes an update of the `language` recipe took 5.0 s spinning and 0.7 s asleep.
    No number of the run depends on it.
    """
    if "torch" not in sys.modules:  # it reads the environment once
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
