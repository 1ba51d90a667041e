"""The files of the project: they name no machine, hold one version, and speak of the project."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Written so that no pattern matches its own line here.
FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.~/-])/(?:work|home|root|Users)/\w"),
    "the host of a package registry": re.compile(
        r"py[p]i\.org|pythonh[o]sted\.org|download\.p[y]torch\.org|registry\.np[m]js|index[-_]ur[l]"
    ),
    "the sitting in which a text was written": re.compile(
        r"(?<!scope=\")(?<!pytest\.)\bs[e]ssions?\b", re.IGNORECASE
    ),
}


def project_files() -> list[Path]:
    """Every text file that is tracked or would be."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        check=True,
        capture_output=True,
        cwd=ROOT,
        text=True,
    )
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()]


def faults_of(text: str) -> list[str]:
    return [
        f"line {number} holds {what}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in FORBIDDEN.items()
        if pattern.search(line)
    ]


def test_no_file_names_a_machine_a_registry_or_a_sitting() -> None:
    faults = {
        str(path.relative_to(ROOT)): found
        for path in project_files()
        if (found := faults_of(path.read_text(encoding="utf-8")))
    }
    assert faults == {}


@pytest.mark.parametrize(
    "text",
    [
        "see " + "/work" + "/notes.md",
        "cd " + "/home" + "/ada",
        "from pypi" + ".org",
        "--index" + "-url",
        "Found in an earlier ses" + "sion.",
    ],
)
def test_the_word_check_sees_a_fault(text: str) -> None:
    assert len(faults_of(text)) == 1


@pytest.mark.parametrize(
    "text", ["src/wo" + "rk/x.py", "obses" + "sion", '@pytest.fixture(scope="ses' + 'sion")']
)
def test_the_word_check_lets_other_words_pass(text: str) -> None:
    assert faults_of(text) == []


def test_the_source_is_ascii() -> None:
    not_ascii = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if not line.isascii()
    ]
    assert not_ascii == []


def test_the_version_stands_in_one_place() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    home = ROOT / settings["tool"]["hatch"]["version"]["path"]
    assert "version" in settings["project"]["dynamic"]
    holders = [
        path
        for path in project_files()
        if path.suffix == ".py"
        and re.search(r"^__version__ = ", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert holders == [home]


def test_every_development_tool_is_pinned() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = settings["project"]["optional-dependencies"]
    wanted = {re.split(r"[\[<>=]", name)[0] for name in (*extras["dev"], *extras["docs"], "torch")}
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert wanted <= {pin.partition("==")[0] for pin in pins if "==" in pin}


def test_every_decision_is_listed() -> None:
    decisions = ROOT / "docs" / "decisions"
    listed = (decisions / "README.md").read_text(encoding="utf-8")
    written = [path.name for path in sorted(decisions.glob("*.md")) if path.name != "README.md"]
    assert [name for name in written if f"({name})" not in listed] == []
