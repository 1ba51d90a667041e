"""The flake8 plugin: flake8 itself finds it, reports through it and obeys its own comments."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOOP = "for x, y in loader:\n    criterion(model(x), y).backward()\n    optimizer.step()"


def flake8(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    (tmp_path / "setup.cfg").write_text(
        "[flake8]\nselect = MS\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "flake8", "--config", "setup.cfg", "train.py"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_flake8_reports_errors_and_warnings_and_obeys_its_comments(tmp_path: Path) -> None:
    (line,) = flake8(tmp_path, f"{LOOP}\n")
    assert line.startswith("train.py:3:5: MS109 zero-grad-missing: `optimizer.step()` uses")
    assert flake8(tmp_path, f"{LOOP}  # noqa: MS109\n") == []
    assert flake8(tmp_path, f"{LOOP}  # midstep: ignore[MS109]\n") == []


def test_the_entry_point_names_what_exists() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    module, _, name = settings["project"]["entry-points"]["flake8.extension"]["MS"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
