"""The linter against the corpus of loops: each mark is found, on its line, and nothing else is."""

import re
from pathlib import Path

import pytest

from midstep.defects import CATALOGUE, SETUP, Defect, Level, Tool
from midstep.lint import Source, lint, read

LOOPS = Path(__file__).parents[1] / "loops"
FILES = sorted(LOOPS.glob("*/*.py"))
EXPECT = re.compile(r"# expect(?:\[(?P<tool>\w+)\])?: (?P<codes>MS\d+(?:, MS\d+)*)")


def folder_of(defect: Defect) -> Path:
    return LOOPS / f"{defect.code}_{defect.name.replace('-', '_')}"


def marks(text: str, tool: Tool) -> set[tuple[str, int]]:
    return {
        (code, number)
        for number, line in enumerate(text.splitlines(), start=1)
        for mark in EXPECT.finditer(line)
        if mark["tool"] in {None, tool}
        for code in mark["codes"].split(", ")
    }


def reported(source: Source, own: str) -> set[tuple[str, int]]:
    """Errors, warnings, and the file's own defect also as advice."""
    return {
        (finding.defect.code, finding.line)
        for finding in lint(source).findings
        if finding.level is not Level.ADVICE or finding.defect.code == own
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name[:5]}-{path.stem}")
def test_what_is_marked_is_found_and_nothing_else(path: Path) -> None:
    source = read(path)
    assert reported(source, path.parent.name[:5]) == marks(source.text, Tool.LINT)


@pytest.mark.parametrize("defect", CATALOGUE, ids=lambda defect: defect.code)
def test_each_defect_has_two_bad_and_two_good_loops_that_keep_their_promise(defect: Defect) -> None:
    bad = sorted(folder_of(defect).glob("bad_*.py"))
    good = sorted(folder_of(defect).glob("good_*.py"))
    assert len(bad) >= 2
    assert len(good) >= 2
    for path in bad:
        text = path.read_text(encoding="utf-8")
        found_by = {tool for tool in Tool if (defect.code in {c for c, _ in marks(text, tool)})}
        assert Tool.LINT not in defect.tools or Tool.LINT in found_by
        assert found_by
    for path in good:
        assert "# expect" not in path.read_text(encoding="utf-8")


def test_every_folder_of_the_corpus_is_that_of_a_defect() -> None:
    assert {path.parent for path in FILES} == {folder_of(defect) for defect in CATALOGUE}


@pytest.mark.parametrize("defect", CATALOGUE, ids=lambda defect: defect.code)
def test_the_code_of_the_catalogue_has_what_it_shows(defect: Defect) -> None:
    bad, good = Source("bad.py", SETUP + defect.bad), Source("good.py", SETUP + defect.good)
    marked = {
        (defect.code, number)
        for number, line in enumerate(bad.text.splitlines(), start=1)
        if line.endswith(f"# {defect.code}")
    }
    assert reported(bad, defect.code) == (marked if Tool.LINT in defect.tools else set())
    assert reported(good, defect.code) == set()
