"""`midstep report` as its user meets it: what it says, what it writes, how it ends."""

import json
import re
from pathlib import Path

import pytest
import tiny
from test_records import record_of


def write(folder: Path, *, norm_of_60: float = 1.0) -> Path:
    folder.mkdir()
    records = [
        record_of(
            update=n,
            step=n,
            grad_norm=norm_of_60 if n == 60 else 0.8 + n % 3 / 10,
            clip_coefficient=1.0,
            clipped=False,
        )
        for n in range(1, 101)
    ]
    text = "".join(record.to_json() + "\n" for record in records)
    (folder / "updates.jsonl").write_text(text)
    return folder


def test_a_run_that_was_trained_ends_with_its_verdict_and_the_command_that_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny.write(tmp_path / "tiny.py", ("ByGlobalNorm(0.5)", "ByGlobalNorm(50.0)"))
    folder = tmp_path / "run"
    assert tiny.run("train", path, "--out", folder) == 0
    out = capsys.readouterr().out
    assert re.search(r"^verdict +nothing found$", out, re.MULTILINE)
    assert re.search(rf"^to see it +\S.* report {re.escape(str(folder))}$", out, re.MULTILINE)
    assert tiny.run("report", folder, "--no-page") == 0
    assert capsys.readouterr().out == "run: nothing found in 20 updates\n"


def test_what_training_finds_is_said_with_its_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny.write(tmp_path / "tiny.py")
    assert tiny.run("train", path, "--clip", 0.001, "--out", tmp_path / "run") == 0
    out = capsys.readouterr().out
    assert re.search(r"^verdict +1 finding$", out, re.MULTILINE)
    assert "- clipped at every update\n" in out
    assert "100 % of 20 applied updates were clipped" in out


def test_a_clean_run_is_one_line_and_exit_code_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "clean")
    assert tiny.run("report", folder, "--no-page") == 0
    assert capsys.readouterr().out == "clean: nothing found in 100 updates\n"


def test_a_finding_is_said_in_words_and_as_json_and_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "bad", norm_of_60=80.0)
    assert tiny.run("report", folder, "--no-page") == 1
    out = capsys.readouterr().out
    assert out.startswith("bad: 1 finding in 100 updates\n- a lone spike of the norm\n")
    assert "update 60: norm 80" in out
    assert "Look at: the batch" in out
    assert not (folder / "report.html").exists()
    assert tiny.run("report", folder, "--no-page", "--json") == 1
    (verdict,) = json.loads(capsys.readouterr().out)
    (finding,) = verdict["findings"]
    assert finding["rule"] == "lone-spikes"
    assert finding["updates"] == [60, 60]
    assert finding["figures"]["largest"] == 80.0
    assert verdict["facts"]["updates"] == "100 applied"


def test_runs_of_one_name_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name).mkdir()
        write(Path(name) / "run")
    assert tiny.run("report", "a/run", "b/run", "--no-page") == 0
    out = capsys.readouterr().out.splitlines()
    assert out == [f"{name}/run: nothing found in 100 updates" for name in "ab"]


def test_a_foreign_log_is_read_with_the_names_and_the_threshold_that_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.csv"
    rows = [f"{n},{2 + 1 / n},{1 + n * 7919 % 100 / 100}" for n in range(1, 101)]
    path.write_text("\n".join(["step,loss,g", *rows]))
    options = ("--column", "grad_norm=g", "--max-norm", 0.5, "--no-page")
    assert tiny.run("report", path, *options) == 1
    assert "- clipped at every update" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere",), "`nowhere` does not exist"),
        (("{run}", "--column", "grad_norm=g"), "whose names are known"),
        (("{run}", "--column", "grad_norm"), "it takes a field of a run and a name"),
        (("{run}", "--max-norm", "0"), "must be greater than 0"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    folder = write(tmp_path / "run")
    given = [argument.format(run=folder) for argument in arguments]
    assert tiny.run("report", *given, "--no-page") == 2
    assert words in tiny.one_line(capsys)


def test_the_report_needs_neither_torch_nor_what_draws_to_say_its_verdict(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    modules = tiny.loaded_by("report", str(folder), "--no-page")
    assert "midstep.report" in modules
    assert not {"torch", "altair", "vl_convert"} & modules
    assert not {"torch", "numpy", "altair"} & tiny.loaded_by("report", "--help")
