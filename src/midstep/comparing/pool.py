"""The pool: cells side by side, one process each, up to the cores or accelerators there are."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from ..errors import MidstepError
from .cell import Ending, ending_of, write_task
from .grid import Cell

__all__ = ["num_places", "run_cells"]

_POLL_SECONDS = 0.1


def num_places() -> tuple[int, int]:
    """Count the places there are for cells: accelerators, or else cores.

    Returns:
        Places, and how many of them are CUDA devices.
    """
    import torch

    devices = torch.cuda.device_count()
    return (devices or len(os.sched_getaffinity(0)) or 1), devices


def run_cells(
    recipe: str,
    cells: Sequence[Cell],
    *,
    jobs: int,
    num_devices: int,
    on_end: Callable[[Cell, Ending], None],
) -> None:
    """Run every cell that has not ended yet; one that was killed goes on where it was saved.

    Args:
        recipe: As it was named.
        cells: In the order in which they are begun.
        jobs: Processes at a time. Each gets its share of the cores.
        num_devices: CUDA devices to hand out in turn; 0 for none.
        on_end: Called as each ends, those that had ended before included.

    Raises:
        MidstepError: A cell could not be run; the others that ran are kept.
    """
    waiting = []
    for cell in cells:
        ending = ending_of(cell.path)
        if ending is None:
            waiting.append(cell)
        else:
            on_end(cell, ending)
    running: dict[int, tuple[Cell, subprocess.Popen[bytes]]] = {}
    try:
        while waiting or running:
            for place in range(jobs):
                if place not in running and waiting:
                    cell = waiting.pop(0)
                    write_task(cell, recipe)
                    running[place] = cell, _begun(cell, place, jobs, num_devices)
            for place, (cell, process) in list(running.items()):
                if process.poll() is not None:
                    del running[place]
                    _reap(process)
                    on_end(cell, _ended(cell, process))
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt as error:
        error.add_note("What was run is kept; the same command goes on.")
        raise
    finally:
        for _, process in running.values():
            process.terminate()  # a cell saves as it goes, so that it goes on from there
        for _, process in running.values():
            _reap(process)


def _begun(cell: Cell, place: int, jobs: int, num_devices: int) -> subprocess.Popen[bytes]:
    cores = len(os.sched_getaffinity(0))
    environment = {"OMP_NUM_THREADS": str(max(1, cores // jobs)), **os.environ}
    if num_devices:
        environment["CUDA_VISIBLE_DEVICES"] = str(place % num_devices)
    with (cell.path / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "midstep.comparing", str(cell.path)],
            env=environment,
            stdin=subprocess.PIPE,  # it closes when this process is gone, however it went
            stdout=output,
            stderr=output,
        )


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def _ended(cell: Cell, process: subprocess.Popen[bytes]) -> Ending:
    ending = ending_of(cell.path)
    if ending is not None:
        return ending
    said = (cell.path / "output.txt").read_text(encoding="utf-8", errors="replace").strip()
    last = said.splitlines()[-1].removeprefix("midstep: ") if said else "it said nothing"
    last = last.removesuffix(" `--traceback` shows where.")  # an option of another command
    raise MidstepError(
        f"The run `{cell.variant.name}` with seed {cell.seed} ended with exit code "
        f"{process.returncode}: {last} What was run is kept; the same command goes on."
    )
