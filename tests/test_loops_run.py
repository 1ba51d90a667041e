"""The corpus of loops runs: bad loops too, unless they say that torch stops them."""

import builtins
import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize("path", TOGETHER, ids=lambda path: f"{path.parent.name[:5]}-{path.stem}")
def test_a_loop_for_many_ranks_runs_on_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = torch.distributed.init_process_group

    def alone(backend: str) -> None:
        begin(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)

    monkeypatch.setattr(torch.distributed, "init_process_group", alone)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(path), run_name="__main__")
    assert not torch.distributed.is_initialized()
