"""What `import midstep` promises: it is quick, and its names are these."""

import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest

import midstep

ROOT = Path(midstep.__file__).parent
SUBMODULES = {name for name, module in midstep._PUBLIC.items() if name == module}
MODULES = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}


def run(program: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=120)


def type_checking_imports() -> dict[str, str]:
    """The public names as type checkers see them, each with the module it comes from."""
    tree = ast.parse(Path(midstep.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            module = str(node.module).removeprefix("midstep").removeprefix(".")
            found[alias.name] = module or alias.name
    return found


def test_importing_the_package_does_not_import_torch() -> None:
    run("import sys, midstep; assert not {'torch', 'numpy'} & set(sys.modules)")


def test_asking_for_help_does_not_import_torch() -> None:
    run(
        "import sys\n"
        "from midstep.cli import main\n"
        "sys.argv = ['midstep', '--help']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )


def test_the_three_lists_of_public_names_are_one() -> None:
    assert midstep.__all__ == list(midstep._PUBLIC)
    assert type_checking_imports() == midstep._PUBLIC


def test_the_public_names_are_few() -> None:
    assert len(midstep.__all__) <= 50


def test_dir_shows_every_public_name() -> None:
    assert set(midstep.__all__) <= set(dir(midstep))


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="`midstep` has no attribute `Refresher`"):
        _ = midstep.Refresher


def test_no_module_hides_a_public_name() -> None:
    # Importing `midstep/verify.py` sets `midstep.verify` to the module, whatever the table says:
    # a function of that name would be callable or not depending on what was imported before.
    # Name the module otherwise.
    assert MODULES & set(midstep.__all__) <= SUBMODULES


@pytest.mark.parametrize("name", midstep.__all__)
def test_a_public_name_is_defined_where_the_table_says(name: str) -> None:
    thing = getattr(midstep, name)
    if isinstance(thing, types.ModuleType):
        assert thing.__name__ == f"midstep.{name}"
    else:
        home = f"midstep.{midstep._PUBLIC[name]}"
        assert f"{thing.__module__}.".startswith(f"{home}.")
