"""The corpus of loops runs: bad loops too, unless they say that torch stops them."""

import builtins
import re
import runpy
import warnings
from collections.abc import Iterator
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


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    # One group for all of them: replicas that outlive their group have hung here.
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("path", TOGETHER, ids=lambda path: f"{path.parent.name[:5]}-{path.stem}")
def test_a_loop_for_many_ranks_runs_on_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, name=name: calls.append(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(path), run_name="__main__")
    assert calls == ["init_process_group", "destroy_process_group"]
