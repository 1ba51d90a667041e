"""Help is complete, starts fast because torch stays out, and names no command that is not there."""

import dataclasses
import re
from pathlib import Path

import pytest
import tiny

from midstep.cli.options import Options, PrecisionName, ScheduleName

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("train", "--help"),
        ("train", "language", "--size", "-1"),
        ("train", "no_such_recipe"),
        ("train", "language", "--size", "1", "--rows", "1"),
    ],
)
def test_torch_stays_out_until_something_is_trained(arguments: tuple[str, ...]) -> None:
    modules = tiny.loaded_by(*arguments)
    assert "midstep.cli" in modules
    assert not {"torch", "numpy", "sympy"} & modules


def test_a_command_is_loaded_without_the_others() -> None:
    modules = tiny.loaded_by("schedule", "--no-such-option")
    assert "midstep.cli.schedule" in modules
    assert not {"midstep.cli.train", "midstep.cli.plan", "midstep.cli.report"} & modules


def test_help_explains_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny.run("train", "--help") == 0
    text = " ".join(re.sub("[^!-~ ]", " ", capsys.readouterr().out).split())
    for field in dataclasses.fields(Options):
        option = f" --{field.name.replace('_', '-')} "
        assert option in text
        entry = text.partition(option)[2].partition(" --")[0]
        assert "Default:" in text.partition(option)[2], entry
    for option in ("--out", "--resume", "--traceback"):
        assert f" {option} " in text
    assert "fp32" in text
    assert "inverse-sqrt" in text


def test_only_commands_that_exist_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny.run("--help") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    listed = {row[1] for row in rows if len(row) > 2 and row[0] == "│"}
    assert {"train", "report", "verify", "audit", "lint", "compare", "plan"} <= listed
    assert "replay" not in listed


def test_without_arguments_there_is_help_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tiny.run() == 2
    out, err = capsys.readouterr()
    assert "Usage: midstep" in out
    assert err == ""


def test_the_page_explains_every_option_of_the_command() -> None:
    text = PAGE.read_text(encoding="utf-8")
    options = [field.name.replace("_", "-") for field in dataclasses.fields(Options)]
    for option in (*options, "out", "resume", "traceback"):
        assert re.search(rf"^- `--{option}[ `]", text, re.MULTILINE), option
    for name in (*PrecisionName, *ScheduleName):
        assert name in text


def test_the_recipe_of_the_page_trains_and_an_error_in_it_reads_as_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    code = page.partition('```python title="mine.py"\n')[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(code)
    assert tiny.run("train", "mine.py") == 0
    assert "below the baseline of guessing" in capsys.readouterr().out
    Path("mine.py").write_text(code.replace("randn(256, 8)", "randn(256, 9)"))
    assert tiny.run("train", "mine.py") == 2
    assert tiny.one_line(capsys) in page
