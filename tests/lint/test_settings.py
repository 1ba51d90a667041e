"""Settings: the nearest `pyproject.toml` counts, and what is not understood is refused."""

from pathlib import Path

import pytest

from midstep.lint.settings import Settings, SettingsError, settings_for


def project(folder: Path, table: str) -> Path:
    (folder / "pyproject.toml").write_text(f"[tool.midstep.lint]\n{table}\n", encoding="utf-8")
    return folder


def test_the_nearest_file_above_counts(tmp_path: Path) -> None:
    project(tmp_path, 'select = ["MS1"]\nadvice = true')
    inner = tmp_path / "src"
    inner.mkdir()
    found = settings_for(inner)
    assert (found.select, found.advice, found.folder) == (("MS1",), True, tmp_path.resolve())
    project(inner, 'ignore = ["MS104"]')
    assert settings_for(inner).ignore == ("MS104",)
    assert settings_for(inner).select == ()


def test_without_a_file_nothing_is_set(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    assert settings_for(tmp_path) == Settings(folder=tmp_path.resolve())


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ('choose = ["MS1"]', "`choose = "),
        ('select = "MS1"', "`select = 'MS1'`"),
        ("ignore = [1]", "`ignore = "),
        ("advice = 1", "`advice = 1`"),
        ("select = [", "pyproject.toml`: "),
    ],
)
def test_a_table_that_is_not_understood_is_refused(tmp_path: Path, table: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why.replace("[", r"\[")):
        settings_for(project(tmp_path, table))


@pytest.mark.parametrize(
    ("pattern", "left_out"),
    [("tests/loops", True), ("tests/*", True), ("*.py", True), ("train.py", True), ("src", False)],
)
def test_patterns_leave_files_and_folders_out(tmp_path: Path, pattern: str, left_out: bool) -> None:
    settings = settings_for(project(tmp_path, f'exclude = ["{pattern}"]'))
    path = tmp_path / "tests" / "loops" / "train.py"
    assert settings.leaves_out(path) is left_out
    assert not settings.leaves_out(tmp_path.parent / "train.py")
