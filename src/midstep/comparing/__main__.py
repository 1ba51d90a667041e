"""The process of one cell: `python -m midstep.comparing FOLDER`."""

import os
import sys
import threading
from pathlib import Path

from ..cli.failures import FINE, attempt
from ..cli.waiting import sleep_while_waiting


def _run() -> int:
    sleep_while_waiting()
    threading.Thread(target=_end_with_the_comparison, daemon=True).start()

    from .cell import run_cell

    run_cell(Path(sys.argv[1]))
    return FINE


def _end_with_the_comparison() -> None:
    """End this process when the one that began it is gone, even by a kill: it holds a folder."""
    os.read(0, 1)  # not `sys.stdin`, whose lock a thread may hold when the interpreter ends
    os._exit(143)


if __name__ == "__main__":
    sys.exit(attempt(_run, traceback=False))
