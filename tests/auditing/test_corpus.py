"""Every script of the corpus, run and watched: bad ones on their lines, good ones silent."""

import os
import re
from pathlib import Path

import pytest
import watched
from distributed.processes import run

from midstep.auditing.checks import check
from midstep.auditing.events import Recording
from midstep.defects import CATALOGUE, Tool
from midstep.findings import Finding

LOOPS = Path(__file__).parents[1] / "loops"
SCRIPTS = sorted(LOOPS.glob("*/*.py"))
AUDITED = {defect.code for defect in CATALOGUE if Tool.AUDIT in defect.tools}
MARK = re.compile(r"# expect(?:\[(?P<tool>\w+)\])?: (?P<codes>[MS\d, ]+)")


def needs_ranks(path: Path) -> bool:
    return "# ranks: 2" in path.read_text(encoding="utf-8")


def expected(text: str) -> set[tuple[str, int]]:
    return {
        (code.strip(), number)
        for number, line in enumerate(text.splitlines(), start=1)
        if (mark := MARK.search(line)) and mark["tool"] in {None, "audit"}
        for code in mark["codes"].split(",")
        if code.strip() in AUDITED
    }


def reported(path: Path, found: list[Finding]) -> set[tuple[str, int]]:
    """What is reported by default, and the defect the script is about, also as advice."""
    own = path.parent.name[:5]
    return {(f.defect.code, f.line) for f in found if f.level != "advice" or f.defect.code == own}


def title(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


@pytest.mark.parametrize("path", [p for p in SCRIPTS if not needs_ranks(p)], ids=title)
def test_a_script_is_judged_as_it_is_marked(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = watched.find_in(tmp_path / path.name, text)
    assert reported(path, found) == expected(text)


def record_on_rank(rank: int, size: int, path: str, text: str) -> Recording:
    # The script makes the process group of this test its own.
    own = 'dist.init_process_group("gloo")'
    assert own in text
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    text = text.replace(own, "dist.get_rank()").replace("dist.destroy_process_group()", "None")
    return watched.record(Path(path), text)


@pytest.mark.distributed
@pytest.mark.parametrize("path", [p for p in SCRIPTS if needs_ranks(p)], ids=title)
def test_a_script_of_two_ranks_is_judged_as_it_is_marked(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = check(run(record_on_rank, str(tmp_path / path.name), text, size=2))
    assert reported(path, found) == expected(text)
