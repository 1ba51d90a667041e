"""Docstrings say what is: the arguments they name are those of the signature, everywhere.

Doctests run the examples. What is checked here is what no example shows. A docstring need not list
its arguments; where it does, the list is complete, in order, and names nothing else.
"""

import enum
import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Callable, Iterator

import pytest

import midstep

ARGUMENT = re.compile(r"^ {4}\*{0,2}(\w+):", re.MULTILINE)

# `midstep.__main__` is the command itself.
MODULES = [
    module.name
    for module in pkgutil.walk_packages(midstep.__path__, "midstep.")
    if not module.name.endswith(".__main__")
]


def names_under(title: str, docstring: str) -> list[str] | None:
    """The names that a section lists, or None if there is no such section."""
    # A section goes on until a line that is neither empty nor indented.
    section = re.search(rf"^{title}:\n(?P<body>(?:(?: .*)?\n)*)", f"{docstring}\n", re.MULTILINE)
    return None if section is None else ARGUMENT.findall(section["body"])


def names_passed(thing: Callable[..., object]) -> list[str]:
    return list(inspect.signature(thing).parameters)


def methods_of(cls: type) -> Iterator[tuple[str, Callable[..., object]]]:
    for name, member in vars(cls).items():
        if isinstance(member, classmethod | staticmethod | types.FunctionType):
            yield f"{cls.__name__}.{name}", getattr(cls, name)


def documented_callables(module: types.ModuleType) -> Iterator[tuple[str, Callable[..., object]]]:
    for name, thing in vars(module).items():
        if getattr(thing, "__module__", None) != module.__name__:
            continue  # only named here, defined elsewhere
        if isinstance(thing, type):
            yield name, thing
            yield from methods_of(thing)
        elif isinstance(thing, types.FunctionType):
            yield name, thing


def fault_of(thing: Callable[..., object]) -> str | None:
    documented = names_under("Args", inspect.cleandoc(thing.__doc__ or ""))
    if documented is None:
        return None
    # An unbound method still has its `self`.
    passed = [name for name in names_passed(thing) if name not in {"self", "cls"}]
    return None if documented == passed else f"documents {documented}, takes {passed}"


@pytest.mark.parametrize("name", MODULES)
def test_documented_arguments_are_those_of_the_signature(name: str) -> None:
    faults = {
        place: fault
        for place, thing in documented_callables(importlib.import_module(name))
        if (fault := fault_of(thing)) is not None
    }
    assert faults == {}


@pytest.mark.parametrize("name", midstep.__all__)
def test_a_public_name_explains_itself(name: str) -> None:
    thing = getattr(midstep, name)
    docstring = inspect.cleandoc(thing.__doc__ or "")
    first_line, _, rest = docstring.partition("\n")
    assert first_line.endswith("."), "the first line is one sentence"
    assert not rest or rest.startswith("\n"), "an empty line follows the first"
    if isinstance(thing, types.ModuleType):
        return
    assert ">>> " in docstring, "an example that runs"
    # A record or an exception is given to the caller, who reads its attributes and makes none.
    is_given = names_under("Attributes", docstring) is not None
    is_fixed = isinstance(thing, type) and issubclass(thing, enum.Enum | BaseException)
    if not (is_given or is_fixed) and names_passed(thing):
        assert names_under("Args", docstring) is not None, "what each argument means"


def scale(value: float, *, by: float = 2.0) -> float:
    """Multiply.

    Args:
        value: What is multiplied,
            at length: by what follows.
        by: The factor.

    Returns:
        value: Not an argument.
    """
    return value * by


def shrink(value: float, *, by: float = 2.0) -> float:
    """Divide.

    Args:
        value: What is divided.
        divisor: A name that the argument had once.
    """
    return value / by


def test_the_comparison_of_arguments_sees_a_fault() -> None:
    assert fault_of(scale) is None
    assert fault_of(shrink) == "documents ['value', 'divisor'], takes ['value', 'by']"
