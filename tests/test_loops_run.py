"""The corpus of loops runs: bad loops too, unless they say that torch stops them."""

import builtins
import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

LOOPS = Path(__file__).parent / "loops"
FILES = sorted(LOOPS.glob("*/*.py"))
ALONE = [path for path in FILES if "# ranks:" not in path.read_text(encoding="utf-8")]
TOGETHER = [path for path in FILES if path not in ALONE]
STOPS = re.compile(r"^# stops with: (\w+)$", re.MULTILINE)


@pytest.mark.parametrize("path", ALONE, ids=lambda path: f"{path.parent.name[:5]}-{path.stem}")
def test_a_loop_runs(path: Path) -> None:
    stops = STOPS.search(path.read_text(encoding="utf-8"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of some bad loops itself
        if stops is None:
            runpy.run_path(str(path), run_name="__main__")
        else:
            with pytest.raises(getattr(builtins, stops[1])):
                runpy.run_path(str(path), run_name="__main__")


def run_all(rank: int, store: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begin = torch.distributed.init_process_group

    def init_process_group(backend: str) -> None:
        begin(backend, init_method=f"file://{store}{number}", rank=rank, world_size=2)

    torch.distributed.init_process_group = init_process_group
    for number, path in enumerate(TOGETHER):
        runpy.run_path(str(path), run_name="__main__")


@pytest.mark.distributed
def test_the_loops_on_two_ranks_run(tmp_path: Path) -> None:
    assert len(TOGETHER) >= 24
    mp.spawn(run_all, args=(str(tmp_path / "store"),), nprocs=2)
