"""What the documentation says is run: every Python block of every page, in order.

The blocks of one page share their names, as they do for a reader who types them in. Each page runs
in an empty folder. A block that must not run is not Python: label it `text`.
"""

import re
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<label>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
RUNS = "python"
# Named one by one, so that no Python escapes under another spelling.
DOES_NOT_RUN = {"bash", "console", "diff", "ini", "json", "text", "toml", "yaml"}


class Block(NamedTuple):
    line: int  # of its first line of code, in the page
    label: str
    code: str


def blocks_of(text: str) -> Iterator[Block]:
    for fence in FENCE.finditer(text):
        line = text.count("\n", 0, fence.start("body")) + 1
        label = fence["label"].strip().partition(" ")[0]
        yield Block(line, label, textwrap.dedent(fence["body"]))


def run_blocks(text: str, file: str, namespace: dict[str, object]) -> None:
    for block in blocks_of(text):
        if block.label == RUNS:
            # Empty lines in front: a traceback names the line of the page.
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, file, "exec"), namespace)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # A real module: dataclasses and pickle look their classes up by it.
    module = types.ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    run_blocks(page.read_text(encoding="utf-8"), str(page), vars(module))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_block_of_a_page_says_what_it_is(page: Path) -> None:
    labels = {block.label for block in blocks_of(page.read_text(encoding="utf-8"))}
    assert labels <= {RUNS, *DOES_NOT_RUN}


def test_blocks_share_their_names_and_run_in_order() -> None:
    namespace: dict[str, object] = {}
    page = "```python\nx = 1\n```\n\n=== tab\n\n    ```python\n    y = x + 1\n    ```\n"
    run_blocks(page, "page.md", namespace)
    assert namespace["y"] == 2


def test_a_block_that_fails_names_its_line_of_the_page() -> None:
    page = "# Title\n\n```text\nno code\n```\n\n```python\nfine = 1\nraise ValueError\n```\n"
    with pytest.raises(ValueError) as failure:  # noqa: PT011 - it has no message
        run_blocks(page, "page.md", {})
    assert failure.traceback[-1].lineno == 8  # counted from 0
