"""The process of one cell: `python -m midstep.comparing FOLDER`."""

import sys
from pathlib import Path

from ..cli.failures import FINE, attempt
from ..cli.waiting import sleep_while_waiting


def _run() -> int:
    sleep_while_waiting()

    from .cell import run_cell

    run_cell(Path(sys.argv[1]))
    return FINE


if __name__ == "__main__":
    sys.exit(attempt(_run, traceback=False))
