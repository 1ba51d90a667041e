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
    from ..recipes.recipe import Recipe
    from ..recipes.settings import Settings
    from .options import Options

__all__ = ["about", "changes", "refuse_another_recipe", "refuse_another_run"]

# They decide no weight, so a run may go on with others.
_MAY_CHANGE = ("save_every", "evaluate_every", "observe")
_SHORT = 60  # characters of a value that is worth showing


def about(
    source: str | Path, options: Options, settings: Settings, recipe: Recipe, num_ranks: int
) -> dict[str, Any]:
    """Describe a run as it is begun, in plain values, for `run.json`.

    Args:
        source: What `find_recipe` returned.
        options: What was typed.
        settings: What it came to.
        recipe: Whose baselines are kept.
        num_ranks: How many train it together.
    """
    from ..recipes.folder import versions

    return {
        "recipe": str(source),
        "recipe_sha256": _sha256(source),
        "options": options.to_json(),
        "settings": settings.words(),
        "baselines": dict(recipe.baselines),
        "num_ranks": num_ranks,
        "versions": versions(),
        "begun": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    }


def refuse_another_run(path: Path, about: Mapping[str, Any], settings: Settings) -> None:
    """Refuse settings under which the run would not be the one that was begun.

    Args:
        path: Of its folder.
        about: How it was begun.
        settings: With which it would go on.

    Raises:
        ValueError: Names what differs, with both values.
    """
    begun: Mapping[str, Any] = about["settings"]
    now = settings.words()
    differences = [
        _difference(name, begun.get(name), value)
        for name, value in now.items()
        if name not in _MAY_CHANGE and begun.get(name) != value
    ]
    if differences:
        raise ValueError(
            f"`{path}` was begun with {' and '.join(differences).rstrip(',')}: it would go "
            "on as another run. Leave the option out (or undo the change of the recipe), or begin "
            "anew."
        )


def refuse_another_recipe(path: Path, about: Mapping[str, Any], source: str | Path) -> None:
    """Refuse a run of another recipe, or of one that was edited since.

    Args:
        path: Of the run's folder.
        about: How the run was begun.
        source: What `find_recipe` returned.

    Raises:
        ValueError: Names both.
    """
    if about["recipe"] != str(source):
        raise ValueError(f"`{path}` is a run of `{about['recipe']}`, not of `{source}`.")
    if about["recipe_sha256"] != _sha256(source):
        raise ValueError(f"`{path}` was run before `{source}` was edited.")


def changes(about: Mapping[str, Any], source: str | Path, num_ranks: int) -> Iterator[str]:
    """Tell what may make the continued run part from the uninterrupted one.

    Args:
        about: How the run was begun.
        source: What `find_recipe` returned.
        num_ranks: How many go on with it together.
    """
    from ..recipes.folder import versions

    if (before := about.get("num_ranks", 1)) != num_ranks:
        yield (
            f"the run was begun on {before} rank{'s' * (before > 1)} and goes on with {num_ranks}, "
            "so sums are rounded in another order, and dropout draws other numbers"
        )
    if about.get("recipe_sha256") != _sha256(source):
        yield f"`{source}` has changed since the run was begun, which may make it another run"
    for name, version in versions().items():
        before = about.get("versions", {}).get(name)
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
