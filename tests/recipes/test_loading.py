"""From a name to a recipe: what is found, what is refused, and which line of it was at fault."""

import random
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

import midstep as ms
from midstep.errors import RecipeError
from midstep.recipes.loading import BUILT_IN, find_recipe, load_recipe
from midstep.recipes.places import describe, is_refusal, place_of


def test_every_built_in_recipe_is_found_and_has_a_module() -> None:
    for name in BUILT_IN:
        assert find_recipe(name) == name
        assert Path(ms.__file__).with_name("recipes").joinpath(f"{name}.py").is_file()


def test_a_file_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write(tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    assert find_recipe("mine.py") == tmp_path / "mine.py"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("languages", "Did you mean `language`"),
        ("mine", "did you mean the file `mine.py`"),
        ("other.py", "no such file"),
        ("folder.py", "no such file"),
        (".", "neither"),
        ("", "neither"),
        ("/", "neither"),
    ],
)
def test_a_name_that_means_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    tiny.write(tmp_path / "mine.py")
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=words):
        find_recipe(name)


def test_the_seed_decides_every_random_stream(tmp_path: Path) -> None:
    file = tmp_path / "draws.py"
    file.write_text(
        "import random, numpy, torch\n"
        "before = random.random(), numpy.random.rand(), torch.rand(()).item()\n"
        + tiny.RECIPE.replace("torch.manual_seed(seed)", "recipe.drawn = before")
    )
    found = []
    for seed in (3, 3, 4):
        recipe = load_recipe(file, seed=seed)
        found.append(
            (
                random.random(),
                np.random.rand(),  # noqa: NPY002
                torch.rand(()).item(),
                next(recipe.model.parameters()).sum().item(),
            )
        )
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])


def test_a_recipe_may_import_its_neighbour_and_define_dataclasses(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("width = 8\n")
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\nimport dataclasses\n"
        "from neighbour_of_mine import width\n"
        "@dataclasses.dataclass\nclass Shape:\n    width: int = width\n" + tiny.RECIPE
    )
    assert isinstance(load_recipe(file, seed=0), ms.Recipe)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("import midstep as ms", "import midstep as ms (", 3, "SyntaxError: invalid syntax"),
        ("import midstep as ms", "import no_such_module", 3, "No module named 'no_such_module'"),
        ("    torch.manual_seed(seed)", "    raise OSError('no data')", 6, "OSError: no data"),
        ("    torch.manual_seed(seed)", "    raise SystemExit(3)", 6, "SystemExit: 3"),
        ("lr=0.01", "lr=-1.0", 14, "the rate must be greater than 0"),
        ("torch.nn.Linear(4, 8)", "torch.nn.Linear('4', 8)", 7, "TypeError"),
    ],
)
def test_a_fault_of_a_recipe_names_its_line(
    tmp_path: Path, old: str, new: str, line: int, words: str
) -> None:
    file = tiny.write(tmp_path / "bad.py", (old, new))
    with pytest.raises(RecipeError) as failure:
        load_recipe(file, seed=0)
    assert f"bad.py:{line}`" in str(failure.value)
    assert words in str(failure.value)
    assert "\n" not in str(failure.value)
    assert failure.value.__cause__ is not None


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("def recipe(seed)", "def another(seed)", "defines no function `recipe"),
        ("def recipe(seed)", "recipe = 3\ndef another(seed)", "defines no function `recipe"),
        ("return ms.Recipe(", "return dict(", "returned a `dict`"),
    ],
)
def test_a_file_without_a_recipe_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(tiny.write(tmp_path / "bad.py", (old, new)), seed=0)


def test_a_recipe_that_failed_is_imported_anew_when_it_is_mended(tmp_path: Path) -> None:
    file = tiny.write(tmp_path / "mended.py", ("lr=0.01", "lr=-1.0"))
    with pytest.raises(RecipeError):
        load_recipe(file, seed=0)
    tiny.write(file, ("lr=0.01", "lr=0.25"))
    assert load_recipe(file, seed=0).lr == 0.25


def caught(file: Path, code: str) -> Exception:
    file.write_text(code)
    try:
        exec(compile(code, str(file), "exec"), {})
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


def test_the_place_is_the_users_line_nearest_to_the_error(tmp_path: Path) -> None:
    code = "import torch\ndef shape():\n    torch.zeros(2).reshape(3)\n\nshape()\n"
    error = caught(tmp_path / "user.py", code)
    assert place_of(error) == f"{tmp_path / 'user.py'}:3"
    assert describe(error).startswith("RuntimeError: shape '[3]' is invalid")


def test_the_error_of_a_loader_worker_is_that_of_its_last_line(tmp_path: Path) -> None:
    inner = caught(tmp_path / "rows.py", "\n\nraise ValueError('row 7 is broken')\n")
    shown = "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent "
    shown += f'call last):\n  File "{tmp_path / "rows.py"}", line 3, in __getitem__\n    raise\n'
    error = caught(tmp_path / "loop.py", f"raise ValueError({shown + str(repr(inner))!r})")
    error.args = (f"{shown}ValueError: row 7 is broken\n",)
    assert place_of(error) == f"{tmp_path / 'rows.py'}:3"
    assert describe(error) == "ValueError: row 7 is broken"


def test_a_refusal_is_what_midstep_itself_raised(tmp_path: Path) -> None:
    ours = caught(tmp_path / "user.py", "import midstep\nmidstep.ByGlobalNorm(-1.0)\n")
    theirs = caught(tmp_path / "user.py", "import torch\ntorch.zeros(2).reshape(3)\n")
    assert is_refusal(ours)
    assert not is_refusal(theirs)
