"""The bad and the good loop of every entry of the catalogue, run and watched."""

import os
from pathlib import Path

import pytest
import watched
from distributed.processes import run

from midstep.auditing.checks import check
from midstep.auditing.events import Recording
from midstep.defects import CATALOGUE, SETUP, Defect, Tool

AUDITED = [defect for defect in CATALOGUE if Tool.AUDIT in defect.tools]
NEEDS_RANKS = ("distributed", "DistributedDataParallel")
ALONE = [d for d in AUDITED if not any(word in d.bad + d.good for word in NEEDS_RANKS)]
TOGETHER = [d for d in AUDITED if d not in ALONE]
# What else is true of a loop whose entry is about something else.
ALSO = {
    "MS101": {"MS606"},  # a microbatch in which every target is ignored
    "MS603": {"MS601"},  # the loss that is hidden from the log is stepped on
    "MS606": {"MS601"},
}


def expected(defect: Defect, text: str) -> list[int]:
    lines = enumerate(text.splitlines(), start=1)
    return [number for number, line in lines if f"# {defect.code}" in line]


@pytest.mark.parametrize("defect", ALONE, ids=lambda d: f"{d.code}-{d.name}")
def test_the_bad_loop_is_found_on_its_line(defect: Defect, tmp_path: Path) -> None:
    text = SETUP + defect.bad
    found = watched.find_in(tmp_path / "bad.py", text)
    assert [f.line for f in found if f.defect == defect] == expected(defect, text)
    assert set(watched.codes(found)) <= {defect.code, *ALSO.get(defect.code, ())}


@pytest.mark.parametrize("defect", ALONE, ids=lambda d: f"{d.code}-{d.name}")
def test_nothing_is_found_in_the_good_loop(defect: Defect, tmp_path: Path) -> None:
    found = watched.find_in(tmp_path / "good.py", SETUP + defect.good)
    assert watched.codes(found) == []
    assert defect not in [f.defect for f in found]


def record_on_rank(rank: int, size: int, folder: str, *texts: str) -> list[Recording]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    # Every rank has data of its own.
    seeded = [text.replace("torch.manual_seed(0)", f"torch.manual_seed({rank})") for text in texts]
    return [watched.record(Path(folder) / f"{n}.py", text) for n, text in enumerate(seeded)]


@pytest.mark.distributed
@pytest.mark.parametrize("defect", TOGETHER, ids=lambda d: f"{d.code}-{d.name}")
def test_the_loops_of_two_ranks_are_judged_together(defect: Defect, tmp_path: Path) -> None:
    texts = SETUP + defect.bad, SETUP + defect.good
    bad, good = zip(*run(record_on_rank, str(tmp_path), *texts, size=2), strict=True)
    found = check(bad)
    assert [f.line for f in found if f.defect == defect] == expected(defect, texts[0])
    assert watched.codes(check(good)) == []
