"""Who may import whom, read from the source: the layers hold because this file says so.

A module imports what is below its own tier, and nothing of its own tier except inside one package.
The table names modules before they exist; a module that exists and is not named is a fault.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "midstep"

# What a reader must know before the next line makes sense.
TIERS = (
    ("errors", "records", "schedules", "arithmetic", "defects", "theme"),
    ("findings", "clock", "terms"),
    (
        "pictures",
        "snapshot",
        "sinks",
        "batches",
        "stream",
        "losses",
        "reference",
        "autorows",
        "redoing",
    ),
    ("undoing",),
    ("ranks",),
    ("gradients", "cutting", "cursor", "tally", "seeds", "accumulation", "forward"),
    (
        "window",
        "counts",
        "precision",
        "nonfinite",
        "clip",
        "observers",
        "blame",
        "rates",
        "stepping",
    ),
    ("feed", "measuring", "ending", "passes"),
    ("fitting", "unread"),
    ("late",),
    ("updater",),
    ("trial",),
    (
        "checkpoint",
        "verifying",
        "range_test",
        "recomputing",
        "contrastive",
        "batchnorm",
    ),
    ("planning",),  # measures recompute, too
)
# Beside the tiers: they read text and records, and know nothing of how a step is made.
SIDE = ("lint", "auditing.recorder", "auditing", "report")
SIDE_MAY_IMPORT = 1  # the highest tier
# On top: they may import anything, and nothing but each other imports them.
EDGE = (
    "recipes",
    "integrations",
    "comparing",
    "choosing",
    "cli",
    "figures",
    "__init__",
    "__main__",
)

WITHOUT_TORCH = (*TIERS[0], *TIERS[1], "lint", "auditing", "report")
ONLY_STANDARD_LIBRARY = (*TIERS[0], *TIERS[1])
# Inside a package, where the order is part of the design: a file imports none after itself.
INNER_ORDER = {
    "lint": ("source", "loops", "rules"),
    "auditing": (
        *("written", "events", "source", "history", "checks", "recorder"),
        *("launching", "gathering", "context"),
    ),
    "checkpoint": (
        *("together", "replacing", "checks", "tensors", "alike", "layout", "content"),
        *("metadata", "file", "one_file", "folder", "resuming"),
    ),
}

TIER_OF = {unit: tier for tier, units in enumerate(TIERS) for unit in units}
UNITS = (*TIER_OF, *SIDE, *EDGE)

FILE_LINES = 400
FUNCTION_LINES = 50


class Import(NamedTuple):
    target: str  # dotted, absolute
    line: int


def dotted_name(path: Path, root: Path) -> str:
    """`clip/rules.py` is `clip.rules`, `clip/__init__.py` is `clip`, the root is `__init__`."""
    parts = path.relative_to(root).with_suffix("").parts
    if parts[-1] == "__init__" and len(parts) > 1:
        parts = parts[:-1]
    return ".".join(parts)


def unit_of(name: str) -> str | None:
    """The longest entry of the table that holds this module, or None."""
    holders = [unit for unit in UNITS if name == unit or name.startswith(f"{unit}.")]
    return max(holders, key=len, default=None)


def imports_of(path: Path, root: Path) -> Iterator[Import]:
    """Every import in a file, wherever it stands: also inside functions and under TYPE_CHECKING."""
    package = ("midstep", *path.relative_to(root).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*parent, *((node.module,) if node.module else ())))
            yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in {"import_module", "__import__"} and isinstance(node.args[0], ast.Constant):
                yield Import(str(node.args[0].value), node.lineno)


def allowed(importer: str, imported: str) -> bool:
    if importer in EDGE:
        return True
    if imported in EDGE:
        return False
    if importer in SIDE:
        same_package = imported.partition(".")[0] == importer.partition(".")[0]
        return same_package or TIER_OF.get(imported, sys.maxsize) <= SIDE_MAY_IMPORT
    return imported == importer or TIER_OF.get(imported, sys.maxsize) < TIER_OF[importer]


def against_inner_order(importer: str, imported: str) -> bool:
    package, _, rest = importer.partition(".")
    other_package, _, other_rest = imported.partition(".")
    order = INNER_ORDER.get(package, ())
    first, second = rest.partition(".")[0], other_rest.partition(".")[0]
    if package != other_package or first not in order or second not in order:
        return False
    return order.index(second) > order.index(first)


def fault_of_import(name: str, unit: str, target: str) -> str | None:
    top, _, inside = target.partition(".")
    if top != "midstep":
        if top == "torch" and unit in WITHOUT_TORCH:
            return "torch does not belong in this tier: the commands that read text must start fast"
        if unit in ONLY_STANDARD_LIBRARY and top not in sys.stdlib_module_names:
            return f"`{top}` is not in the standard library, which is all this tier may use"
        return None
    # What is no module of the table is a name of the root: `from midstep import Updater`.
    imported = unit_of(inside) or "__init__"
    if not allowed(unit, imported):
        return f"`{unit}` may not import `{imported}`"
    if against_inner_order(name, inside):
        return f"`{name}` may not import `{inside}`, which comes after it"
    return None


def layer_faults(root: Path) -> list[str]:
    """Each import that goes up or across, as `file:line: why`."""
    names = {path: dotted_name(path, root) for path in sorted(root.rglob("*.py"))}
    unplaced = [
        f"{path.relative_to(root)}: `{name}` is in no tier: give it a place in the table"
        for path, name in names.items()
        if unit_of(name) is None
    ]
    # Without a place, neither its imports nor those of it can be judged.
    return unplaced or [
        f"{path.relative_to(root)}:{line}: {fault}"
        for path, name in names.items()
        if (unit := unit_of(name)) is not None
        for target, line in imports_of(path, root)
        if (fault := fault_of_import(name, unit, target)) is not None
    ]


def docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(function, clean=False) is None:
        return 0
    first = function.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1


def budget_faults(root: Path) -> list[str]:
    """Each file and each function that is too long to be read in one go."""
    faults = []
    for path in sorted(root.rglob("*.py")):
        place, text = path.relative_to(root), path.read_text(encoding="utf-8")
        if (length := len(text.splitlines())) > FILE_LINES:
            faults.append(f"{place}: {length} lines, but a file has at most {FILE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
                if length > FUNCTION_LINES:
                    faults.append(
                        f"{place}:{node.lineno}: `{node.name}` has {length} lines without its "
                        f"docstring, but a function has at most {FUNCTION_LINES}"
                    )
    return faults


def test_every_import_goes_down() -> None:
    assert layer_faults(SOURCE) == []


def test_no_file_and_no_function_is_too_long() -> None:
    assert budget_faults(SOURCE) == []


def test_no_module_has_two_places_in_the_table() -> None:
    assert len(UNITS) == len(set(UNITS))


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        ("window.py", "from .updater import Updater", "`window` may not import `updater`"),
        ("window.py", "from .clip import ByValue", "`window` may not import `clip`"),
        ("window.py", "from midstep import clip", "`window` may not import `clip`"),
        ("window.py", "import midstep.clip.rules", "`window` may not import `clip`"),
        ("window.py", "from midstep import Updater", "`window` may not import `__init__`"),
        ("window.py", "import midstep", "`window` may not import `__init__`"),
        ("losses.py", "from . import gradients", "`losses` may not import `gradients`"),
        ("clip/rules.py", "from ..window import Window", "`clip` may not import `window`"),
        ("updater.py", "from .cli import main", "`updater` may not import `cli`"),
        ("updater.py", "def f():\n    from .verifying import verify", "may not import `verifying`"),
        ("lint/loops.py", "from ..ranks import Ranks", "`lint` may not import `ranks`"),
        ("lint/loops.py", "from .rules import RULES", "which comes after it"),
        ("auditing/checks/a.py", "from ..recorder import core", "which comes after it"),
        ("auditing/checks/a.py", "import torch", "torch does not belong"),
        ("report/page.py", "import torch.nn as nn", "torch does not belong"),
        ("records.py", "def f():\n    import torch", "torch does not belong"),
        ("records.py", "from torch import Tensor", "torch does not belong"),
        ("findings.py", "import importlib\nimportlib.import_module('torch')", "torch does not"),
        ("clock.py", "import numpy as np", "`numpy` is not in the standard library"),
        ("helpers.py", "", "`helpers` is in no tier"),
    ],
)
def test_the_layer_check_sees_a_fault(tmp_path: Path, file: str, line: str, fault: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line, encoding="utf-8")
    (found,) = layer_faults(tmp_path)
    assert fault in found


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("window.py", "from .gradients import Gradients\nfrom .errors import WindowError"),
        ("clip/rules.py", "from .chain import Chain\nfrom ..gradients import Gradients"),
        ("clip/__init__.py", "from .rules import ByValue"),
        ("lint/rules/clipping.py", "from ..loops import Loop\nfrom ...findings import Finding"),
        ("auditing/recorder/core.py", "import torch\nfrom ..events import Event"),
        ("report/page.py", "import altair\nfrom ..records import UpdateRecord"),
        ("cli/train.py", "from ..recipes import language\nfrom ..updater import Updater"),
        ("records.py", "import dataclasses\nimport os.path"),
    ],
)
def test_the_layer_check_lets_a_sound_import_pass(tmp_path: Path, file: str, line: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line, encoding="utf-8")
    assert layer_faults(tmp_path) == []


def test_the_budget_check_sees_a_long_file_and_a_long_function(tmp_path: Path) -> None:
    body = "    x = 1\n" * FUNCTION_LINES
    (tmp_path / "long_function.py").write_text(f"def f():\n{body}", encoding="utf-8")
    (tmp_path / "long_file.py").write_text("x = 1\n" * (FILE_LINES + 1), encoding="utf-8")
    long_file, long_function = budget_faults(tmp_path)
    assert "long_file.py: 401 lines" in long_file
    assert "long_function.py:1: `f` has 51 lines" in long_function


def test_a_docstring_is_free(tmp_path: Path) -> None:
    docstring = '    """' + "law\n" * 100 + '    """\n'
    body = "    x = 1\n" * (FUNCTION_LINES - 1)
    (tmp_path / "explained.py").write_text(f"def f():\n{docstring}{body}", encoding="utf-8")
    assert budget_faults(tmp_path) == []
