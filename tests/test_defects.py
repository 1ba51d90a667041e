"""The catalogue: every entry is whole, and its code shows what it says."""

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from midstep.defects import CATALOGUE, GROUPS, SETUP, Defect, find

# Given once and never again: a code that leaves the catalogue stays in this list.
GIVEN = {
    "1": range(101, 115),
    "2": range(201, 212),
    "3": range(301, 307),
    "4": range(401, 406),
    "5": range(501, 507),
    "6": range(601, 607),
    "7": range(701, 708),
    "8": range(801, 804),
}


def defect_id(defect: Defect) -> str:
    return defect.code


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_codes_are_the_given_ones_in_order() -> None:
    given = [f"MS{number}" for numbers in GIVEN.values() for number in numbers]
    assert [defect.code for defect in CATALOGUE] == given
    assert {code[2] for code in given} == set(GROUPS)


@pytest.mark.parametrize("defect", CATALOGUE, ids=defect_id)
def test_an_entry_is_whole_sentences(defect: Defect) -> None:
    for text in (defect.title, defect.why, defect.effect, defect.fix):
        assert re.search(r"\.`?$", text), text
        assert "  " not in text
    assert defect.tools
    assert len(set(defect.tools)) == len(defect.tools)


@pytest.mark.parametrize("defect", CATALOGUE, ids=defect_id)
def test_the_bad_code_marks_one_line_and_the_good_code_none(defect: Defect) -> None:
    assert defect.bad.count(f"# {defect.code}\n") == defect.bad.count("# MS") == 1
    assert "# MS" not in defect.good
    assert defect.bad != defect.good


@pytest.mark.parametrize("defect", CATALOGUE, ids=defect_id)
@pytest.mark.usefixtures("one_rank")
def test_the_code_of_an_entry_runs(
    defect: Defect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        # One rank has nothing to shard; on several, tests/loops runs the same code.
        warnings.filterwarnings("ignore", message="FSDP is switching")
        exec(SETUP + defect.good, {})
        warnings.simplefilter("ignore")  # torch warns of some bad loops itself
        if defect.stops_with:
            with pytest.raises((RuntimeError, AssertionError)) as stopped:
                exec(SETUP + defect.bad, {})
            assert stopped.type.__name__ == defect.stops_with
        else:
            exec(SETUP + defect.bad, {})


def test_a_defect_is_found_by_code_and_by_name_in_any_case() -> None:
    for defect in CATALOGUE:
        assert find(defect.code.lower()) is find(defect.name.upper()) is defect
    with pytest.raises(KeyError, match="no defect has the code or the name `MS999`"):
        find("MS999")


def test_the_catalogue_is_read_without_torch() -> None:
    program = "import sys, midstep.findings; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=os.environ)
