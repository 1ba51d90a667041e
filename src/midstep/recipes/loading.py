"""Loading: from a name to a recipe, built in or the user's own file.

A user's file is imported as Python would run a script: once, with its folder on the import path.
"""

from __future__ import annotations

import difflib
import importlib.util
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RecipeError
from .places import describe, place_of

if TYPE_CHECKING:
    from .recipe import Recipe

__all__ = ["BUILT_IN", "find_recipe", "load_recipe"]

BUILT_IN = ("language", "digits", "pairs")


def find_recipe(name: str) -> str | Path:
    """Find out what a name means. Imports nothing.

    Args:
        name: A built-in recipe, or the path of a `.py` file.

    Returns:
        The built-in name, or the absolute path of the file.

    Raises:
        RecipeError: It is neither.

    Example:
        >>> find_recipe("language")
        'language'
    """
    if name in BUILT_IN:
        return name
    path = Path(name)
    if path.suffix == ".py":
        if path.is_file():
            return path.absolute()
        raise RecipeError(f"Recipe `{name}`: there is no such file.")
    if Path(f"{name}.py").is_file():
        raise RecipeError(f"Recipe `{name}`: did you mean the file `{name}.py`?")
    near = difflib.get_close_matches(name, BUILT_IN, n=1)
    hint = f" Did you mean `{near[0]}`?" if near else ""
    raise RecipeError(
        f"Recipe `{name}` is neither built in ({', '.join(BUILT_IN)}) nor a `.py` file.{hint}"
    )


def load_recipe(source: str | Path, *, seed: int) -> Recipe:
    r"""Seed every random stream, then make the recipe.

    Args:
        source: What `find_recipe` returned.
        seed: Of python's, numpy's and torch's global streams; also passed to the recipe. From 0 to
            2**32 - 1, which is what numpy takes.

    Raises:
        RecipeError: The file cannot be imported, defines no `recipe(seed)`, or that function
            raises or returns something else. Names file and line; the cause is chained.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "mine.py"
        ...     _ = file.write_text("def recipe(seed):\n    return seed\n")
        ...     load_recipe(file, seed=3)
        Traceback (most recent call last):
        ...
        midstep.errors.RecipeError: ...
    """
    seed_everything(seed)
    if isinstance(source, str):
        module = importlib.import_module(f"{__package__}.{source}")
    else:
        module = _import_file(source)
    return _made_by(_function_of(module, source), source, seed)


def seed_everything(seed: int) -> None:
    """Seed the global random streams of python, numpy and torch.

    Args:
        seed: From 0 to 2**32 - 1.
    """
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global stream is what recipes draw from
    torch.manual_seed(seed)


def _import_file(path: Path) -> types.ModuleType:
    name = f"midstep_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a `.py` file always has one
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their classes up by it
    if str(path.parent) not in sys.path:
        sys.path.insert(
            0, str(path.parent)
        )  # as for a script, so that it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failure(path, error) from error
    return module


def _function_of(module: types.ModuleType, source: str | Path) -> Callable[[int], Any]:
    function = getattr(module, "recipe", None)
    if function is None or not callable(function):
        raise RecipeError(
            f"Recipe `{source}` defines no function `recipe(seed)`, so there is nothing to train. "
            "Define one that returns a `midstep.Recipe`."
        )
    return function  # type: ignore[no-any-return]


def _made_by(function: Callable[[int], Any], source: str | Path, seed: int) -> Recipe:
    from .recipe import Recipe

    try:
        made = function(seed)
    except (Exception, SystemExit) as error:
        raise _failure(source, error) from error
    if not isinstance(made, Recipe):
        raise RecipeError(
            f"Recipe `{source}`: `recipe({seed})` returned a `{type(made).__name__}`. Return a "
            "`midstep.Recipe`."
        )
    return made


def _failure(source: str | Path, error: BaseException) -> RecipeError:
    return RecipeError(f"Recipe `{place_of(error) or source}`: {describe(error)}")
