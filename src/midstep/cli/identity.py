"""Identity: what a run was begun with, and whether it would go on as the same run.

Whatever decides a weight must be the same. What cannot be judged (a recipe's file that was edited,
another version of torch) is told, not refused: an edit may be just what a failed run needs.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..recipes.folder import RunFolder
    from ..recipes.recipe import Recipe
    from ..recipes.settings import Settings
    from .options import Options

__all__ = ["about", "changes", "refuse_another_run"]

# They decide no weight, so a run may go on with others.
_MAY_CHANGE = ("save_every", "evaluate_every", "observe")
_SHORT = 60  # characters of a value that is worth showing


def about(
    source: str | Path, options: Options, settings: Settings, recipe: Recipe
) -> dict[str, Any]:
    """Describe a run as it is begun, in plain values, for `run.json`.

    Args:
        source: What `find_recipe` returned.
        options: What was typed.
        settings: What it came to.
        recipe: Whose baselines are kept.
    """
    from ..recipes.folder import versions

    return {
        "recipe": str(source),
        "recipe_sha256": _sha256(source),
        "options": options.to_json(),
        "settings": settings.words(),
        "baselines": dict(recipe.baselines),
        "versions": versions(),
        "begun": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    }


def refuse_another_run(folder: RunFolder, settings: Settings) -> None:
    """Refuse settings under which the run would not be the one that was begun.

    Args:
        folder: Of the run.
        settings: With which it would go on.

    Raises:
        ValueError: Names what differs, with both values.
    """
    begun: Mapping[str, Any] = folder.about["settings"]
    now = settings.words()
    differences = [
        _difference(name, begun.get(name), value)
        for name, value in now.items()
        if name not in _MAY_CHANGE and begun.get(name) != value
    ]
    if differences:
        raise ValueError(
            f"`{folder.path}` was begun with {' and '.join(differences).rstrip(',')}: it would go "
            "on as another run. Leave the option out (or undo the change of the recipe), or begin "
            "anew."
        )


def changes(folder: RunFolder, source: str | Path) -> Iterator[str]:
    """Tell what may make the continued run part from the uninterrupted one.

    Args:
        folder: Of the run.
        source: What `find_recipe` returned.
    """
    from ..recipes.folder import versions

    if folder.about.get("recipe_sha256") != _sha256(source):
        yield f"`{source}` has changed since the run was begun, which may make it another run"
    for name, version in versions().items():
        before = folder.about.get("versions", {}).get(name)
        if before != version:
            yield (
                f"the run was begun with {name} {before} and goes on with {version}, so its "
                "numbers may differ in the last digits"
            )


def _sha256(source: str | Path) -> str | None:
    if isinstance(source, str):
        return None  # built in: the version of midstep says which
    return hashlib.sha256(source.read_bytes()).hexdigest()


def _difference(name: str, before: object, now: object) -> str:
    if max(len(str(before)), len(str(now))) > _SHORT:
        return f"another `{name}`"
    return f"`{name}` {_spelt(before)}, not {_spelt(now)},"


def _spelt(value: object) -> str:
    return "none" if value is None else str(value)
