"""`midstep audit` of scripts that close their streams, fork, or look at what Python gives them."""

import subprocess
import sys
from pathlib import Path

import pytest
import watched

FAULTY = watched.loop(
    """
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""
)
SUMMARY = "midstep audit: 1 finding in 10 updates. `midstep explain CODE` tells more.\n"
GIVEN = """
import pkgutil
print(type(__builtins__), __builtins__.len, type(__loader__), __cached__, sorted(globals()))
print(__loader__.get_data(__file__)[:7], __annotations__)
number: int = 1
print(__annotations__)
"""


@pytest.fixture(autouse=True)
def _empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def start(text: str, *before: str) -> subprocess.CompletedProcess[str]:
    Path("train.py").write_text(text, encoding="utf-8")
    return subprocess.run(
        [sys.executable, *before, "train.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def audit(text: str, *options: str) -> subprocess.CompletedProcess[str]:
    return start(text, "-m", "midstep", "audit", *options)


def is_told(text: str) -> bool:
    return text.startswith("train.py:") and " error MS109 " in text


@pytest.mark.parametrize(
    "end",
    [
        "import io, sys; sys.stdout = io.StringIO()",
        "import sys; sys.stdout = None",
        "import sys; sys.stdout = sys.stderr = open('log.txt', 'w')",
    ],
)
def test_findings_go_where_stdout_was_before_the_script(end: str) -> None:
    process = audit(FAULTY + end + "\n")
    assert process.returncode == 1
    assert is_told(process.stdout)
    assert process.stderr == SUMMARY


@pytest.mark.parametrize("end", ["import sys; sys.stdout.close()", "import os; os.close(1)"])
def test_findings_go_to_stderr_where_the_script_closed_stdout(end: str) -> None:
    process = audit(FAULTY + end + "\n")
    assert process.returncode == 1
    assert is_told(process.stderr)
    assert process.stderr.endswith(SUMMARY)


def test_a_script_that_closes_stderr_is_reported_on() -> None:
    process = audit(FAULTY + "import sys; sys.stderr.close()\n")
    assert process.returncode == 1
    assert is_told(process.stdout)


def test_findings_that_cannot_be_written_to_a_file_are_not_lost() -> None:
    Path("found").mkdir()
    process = audit(FAULTY, "--out", "found")
    assert process.returncode == 2
    assert is_told(process.stdout)
    assert process.stderr.endswith("/found`: Is a directory; the findings are on stdout.\n")


def test_a_process_that_the_script_forks_by_itself_leaves_the_report_to_the_first() -> None:
    fork = "import os\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\n"
    process = audit(FAULTY + fork)
    assert process.returncode == 1
    assert is_told(process.stdout)
    assert process.stdout.count(" MS109 ") == 1
    # What was done before the fork is counted once.
    assert process.stderr == SUMMARY.replace("updates.", "updates of 2 processes.")


def test_a_script_is_given_what_python_gives_it() -> None:
    plain, audited = start(GIVEN), audit(GIVEN)
    assert audited.stdout == plain.stdout
    assert audited.returncode == plain.returncode == 0
