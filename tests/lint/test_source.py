"""Reading: files, notebooks, folders, and what cannot be read."""

import json
from pathlib import Path

import pytest

from midstep.lint import Source, UnreadableFile, lint, python_files, read

LOOP = ["for x, y in loader:\n", "    criterion(model(x), y).backward()\n", "    optimizer.step()"]


def notebook(path: Path, *cells: list[str]) -> Path:
    code = [{"cell_type": "code", "source": cell} for cell in cells]
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": []}, *code]}))
    return path


def test_a_notebook_is_one_text_and_a_finding_names_its_cell(tmp_path: Path) -> None:
    path = notebook(
        tmp_path / "train.ipynb",
        ["%matplotlib inline\n", "!pip install -q \\\n", "    torch\n", "import torch\n"],
        ["if True:\n", "    names, _ = !ls *.pt\n", "x = %who_ls\n"],
        ["%%capture\n", "%%bash\n", "echo this is not Python {\n"],
        ["%%time\n", *LOOP],
    )
    (finding,) = lint(read(path)).findings
    assert (finding.defect.code, finding.cell, finding.line) == ("MS109", 4, 4)
    assert finding.place.endswith("train.ipynb:cell 4:4:5")


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("old.py", b"print 'x'", "line 1: "),
        ("bytes.py", b"\xff\xfe\x00", "not the text that its encoding promises"),
        ("coding.py", b"# coding: klingon\n", "not the text that its encoding promises"),
        ("null.py", b"x = '\x00'", "cannot be parsed|line 1"),
        ("list.ipynb", b"[]", "not a notebook"),
        ("text.ipynb", b"{", "not a notebook"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path: Path, name: str, data: bytes, why: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UnreadableFile, match=why):
        read(path)


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match="No such file"):
        read(tmp_path / "nothing.py")


def test_an_encoding_that_the_file_declares_is_used(tmp_path: Path) -> None:
    path = tmp_path / "latin.py"
    path.write_bytes(b"# coding: latin-1\nname = '\xe9'\n")
    assert "\xe9" in read(path).text


def test_folders_are_searched_for_code_of_the_project_only(tmp_path: Path) -> None:
    for name in ("a.py", "b/c.py", "b/d.ipynb", ".hidden/e.py", "venv/f.py", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    found = [str(path.relative_to(tmp_path)) for path in python_files([tmp_path])]
    assert found == ["a.py", "b/c.py", "b/d.ipynb"]
    assert list(python_files([tmp_path / "notes.txt"])) == [tmp_path / "notes.txt"]


@pytest.mark.parametrize(
    ("comment", "is_silent"),
    [
        ("  # midstep: ignore[MS109] one step only", True),
        ("  # midstep: ignore[zero-grad-missing]", True),
        ("  # midstep: ignore[MS201, MS1]", True),
        ("  # midstep:ignore[ms109]", True),
        ("  # midstep: ignore[MS201]", False),
        ("  # midstep: ignore", False),
        ("  # ignore[MS109]", False),
    ],
)
def test_a_comment_silences_the_defects_it_names(comment: str, is_silent: bool) -> None:
    text = "".join(LOOP) + comment + "\n"
    assert (lint(Source("a.py", text)).findings == []) is is_silent


def test_a_comment_that_stands_alone_speaks_of_the_next_line_of_code() -> None:
    above = [*LOOP[:2], "    # midstep: ignore[MS109] why\n", "\n", LOOP[2]]
    assert lint(Source("a.py", "".join(above))).findings == []
    too_far = [LOOP[0], "    # midstep: ignore[MS109] why\n", *LOOP[1:]]
    assert len(lint(Source("a.py", "".join(too_far))).findings) == 1


def test_a_comment_that_names_no_defect_is_told() -> None:
    source = Source("a.py", "x = 1  # midstep: ignore[MS999, MS101]\ny = 's: midstep: ignore[]'\n")
    assert source.suppressions.unknown() == [(1, "MS999")]


def test_code_that_is_nested_too_deeply_is_told() -> None:
    deep = "x = " + "+".join("y" for _ in range(5000)) + "\nz.backward()\n"
    with pytest.raises(UnreadableFile, match=r"nested too deeply|cannot be parsed"):
        lint(Source("deep.py", deep))
