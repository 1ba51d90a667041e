"""Loops that look odd and are right: no error and no warning in any of them.

Each file of `decoys/` is a script in a style that is found in public, or does what a watcher
stumbles over.
"""

from pathlib import Path

import pytest
import watched

DECOYS = sorted((Path(__file__).parent / "decoys").glob("*.py"))


@pytest.mark.parametrize("decoy", DECOYS, ids=lambda path: path.stem)
def test_nothing_is_found_in_a_loop_that_is_right(decoy: Path, tmp_path: Path) -> None:
    found = watched.find_in(tmp_path / decoy.name, decoy.read_text(encoding="utf-8"))
    assert [f"{f.place} {f.defect.code} {f.evidence}" for f in found if f.level != "advice"] == []
