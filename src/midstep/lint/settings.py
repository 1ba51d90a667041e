"""Settings of a project: the table `[tool.midstep.lint]` of its `pyproject.toml`."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Settings", "SettingsError", "settings_for"]


class SettingsError(ValueError):
    """A table that cannot be used; the message names the file and the entry."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What a project says about linting; the command line wins over it.

    Args:
        select: Codes, starts of codes, or names of the defects that are reported; empty for all.
        ignore: The same, for those that are left out.
        exclude: Files and folders that are left out, as patterns of whole paths from the folder of
            `pyproject.toml`: `tests/loops/*`.
        advice: Report advice too.
        folder: The folder of `pyproject.toml`.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    advice: bool = False
    folder: Path = Path()

    def leaves_out(self, path: Path) -> bool:
        """Whether a file is not to be read."""
        if not self.exclude:
            return False
        try:
            inside = path.resolve().relative_to(self.folder)
        except ValueError:
            return False
        return any(inside.match(p) or _is_under(inside, p) for p in self.exclude)


def _is_under(path: Path, pattern: str) -> bool:
    return any(parent.match(pattern) for parent in path.parents if parent != Path())


def settings_for(start: Path) -> Settings:
    """Find the settings of the project that a file or a folder belongs to.

    Args:
        start: A file or a folder; the nearest `pyproject.toml` at or above it counts.

    Raises:
        SettingsError: The file cannot be read, or the table has an entry that is not known.
    """
    here = start.resolve()
    for folder in (here, *here.parents):
        path = folder / "pyproject.toml"
        if path.is_file():
            return _read(path)
    return Settings()


def _read(path: Path) -> Settings:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"`{path}`: {error}.") from error
    found = table.get("tool", {}).get("midstep", {}).get("lint", {})
    return _checked(found, path)


def _checked(table: Mapping[str, Any], path: Path) -> Settings:
    given: dict[str, Any] = {}
    for key, value in table.items():
        if key == "advice" and isinstance(value, bool):
            given[key] = value
        elif key in {"select", "ignore", "exclude"} and _is_list_of_text(value):
            given[key] = tuple(value)
        else:
            raise SettingsError(
                f"`{path}`: `[tool.midstep.lint]` has `{key} = {value!r}`, which is not "
                "understood: `select`, `ignore` and `exclude` are lists of text, and `advice` is "
                "true or false."
            )
    return Settings(**given, folder=path.parent)


def _is_list_of_text(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)
