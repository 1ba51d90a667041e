"""`midstep lint` and `midstep explain`, as they are typed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from midstep.cli import run
from midstep.defects import CATALOGUE, SETUP, find

BAD = SETUP + find("MS109").bad
ADVICE = SETUP + find("MS105").bad
GOOD = SETUP + find("MS109").good


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(BAD, encoding="utf-8")
    (tmp_path / "advice.py").write_text(ADVICE, encoding="utf-8")
    (tmp_path / "good.py").write_text(GOOD, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["good.py"], 0),
        (["advice.py"], 0),
        (["advice.py", "--advice"], 1),
        (["."], 1),
        (["bad.py", "--ignore", "MS109"], 0),
        (["bad.py", "--select", "MS2"], 0),
        (["bad.py", "--select", "MS2,zero-grad-missing"], 1),
        (["bad.py", "--select", "MS1", "--ignore", "zero-grad-missing"], 0),
        (["nothing.py"], 2),
        (["bad.py", "--select", "MS999"], 2),
        (["bad.py", "--format", "poem"], 2),
        ([], 2),
    ],
)
@pytest.mark.usefixtures("folder")
def test_the_exit_code_says_what_was_found(arguments: list[str], code: int) -> None:
    assert run(["lint", *arguments]) == code


def test_a_file_that_cannot_be_read_does_not_hide_the_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.py").write_text("def (", encoding="utf-8")
    assert run(["lint", "."]) == 2
    out, err = capsys.readouterr()
    assert "bad.py:12:5: error MS109 zero-grad-missing: " in out
    assert "midstep: `broken.py`: line 1: invalid syntax.\n" in err


@pytest.mark.usefixtures("folder")
def test_text_names_the_place_the_evidence_the_effect_and_the_fix(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(["lint", "bad.py"])
    out, err = capsys.readouterr()
    assert re.fullmatch(
        r"bad\.py:12:5: error MS109 zero-grad-missing: `optimizer\.step\(\)` uses gradients "
        r"that are cleared nowhere\.\n    effect: Every update .*\n    fix: Call .*\n",
        out,
        re.DOTALL,
    )
    assert err == "midstep: 1 error. `midstep explain CODE` says more.\n"


@pytest.mark.usefixtures("folder")
def test_json_holds_all_of_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    run(["lint", "bad.py", "--format", "json"])
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    expected = {"code": "MS109", "level": "error", "path": "bad.py", "line": 12, "column": 5}
    assert expected.items() <= finding.items()


@pytest.mark.usefixtures("folder")
def test_sarif_names_the_rule_the_level_and_the_region(capsys: pytest.CaptureFixture[str]) -> None:
    run(["lint", ".", "--advice", "--format", "sarif"])
    log = json.loads(capsys.readouterr().out)
    (sarif,) = log["runs"]
    assert log["version"] == "2.1.0"
    rules = [rule["id"] for rule in sarif["tool"]["driver"]["rules"]]
    for result in sarif["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in {"error", "warning", "note"}
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] in {"bad.py", "advice.py", "good.py"}
        assert place["region"]["startLine"] >= 1
    assert {"MS109", "MS105"} <= set(rules)


def test_annotations_are_one_line_each_and_escape_what_has_a_meaning(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a,b.py").write_text(BAD, encoding="utf-8")
    run(["lint", "a,b.py", "--format", "github"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("::error file=a%2Cb.py,line=12,col=5,title=MS109 zero-grad-missing::")


def test_fix_mends_the_file_and_reports_the_rest(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "mixed.py"
    path.write_text(SETUP + find("MS803").bad + find("MS109").bad, encoding="utf-8")
    assert run(["lint", "mixed.py", "--fix"]) == 1
    out, err = capsys.readouterr()
    assert "midstep: `mixed.py`: mended 1.\n" in err
    assert "MS803" not in out
    assert "MS109" in out
    assert "total += loss.detach()" in path.read_text(encoding="utf-8")


def test_fix_writes_a_file_in_the_encoding_it_had(folder: Path) -> None:
    for encoding, first in (("utf-8-sig", ""), ("latin-1", "# -*- coding: latin-1 -*-\n")):
        path = folder / f"{encoding}.py"
        text = first + SETUP + "# \u00e9t\u00e9\n" + find("MS803").bad
        path.write_bytes(text.encode(encoding))
        assert run(["lint", path.name, "--fix", "--select", "MS803"]) == 0
        after = text.replace("total += loss", "total += loss.detach()")
        assert path.read_bytes() == after.encode(encoding)


def test_the_project_chooses_and_the_command_line_wins(folder: Path) -> None:
    settings = '[tool.midstep.lint]\nignore = ["MS109"]\nexclude = ["advice.py"]\nadvice = true\n'
    (folder / "pyproject.toml").write_text(settings, encoding="utf-8")
    assert run(["lint", "advice.py"]) == 0
    assert run(["lint", "bad.py", "--select", "MS109"]) == 0
    assert run(["lint", "bad.py", "--ignore", "MS2"]) == 1
    (folder / "pyproject.toml").write_text("[tool.midstep.lint]\ncolour = 1\n", encoding="utf-8")
    assert run(["lint", "good.py"]) == 2


def test_a_comment_that_names_no_defect_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "good.py").write_text("x = 1  # midstep: ignore[MS000]\n", encoding="utf-8")
    assert run(["lint", "good.py"]) == 0
    assert "warning: `good.py:1`: `MS000` in a comment names no defect" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_linting_imports_neither_torch_nor_typer_nor_other_commands() -> None:
    program = (
        "import sys\nfrom midstep.cli import run\ncode = run(['lint', 'bad.py'])\n"
        "assert not {'torch', 'numpy', 'typer', 'midstep.cli.train'} & set(sys.modules)\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        check=False,
        capture_output=True,
        timeout=60,
        env=os.environ,
    )
    assert done.returncode == 1, done.stderr


def test_explain_shows_a_defect_by_code_or_name(capsys: pytest.CaptureFixture[str]) -> None:
    for key in ("MS104", "tail-wrong-divisor"):
        assert run(["explain", key]) == 0
        out = capsys.readouterr().out
        assert out.startswith("MS104 tail-wrong-divisor (warning; found by lint, audit)\n")
        for word in ("Why:", "Effect:", "Fix:", "Bad:", "Good:", "# MS104"):
            assert word in out


def test_explain_without_a_code_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  MS")] == [
        defect.code for defect in CATALOGUE
    ]


def test_explain_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "MS999"]) == 2
    assert "no defect has the code or the name `MS999`" in capsys.readouterr().err
