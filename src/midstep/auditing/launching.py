"""Launching: run a script or a module as Python itself would, and hand back how it ended."""

from __future__ import annotations

import builtins
import dataclasses
import importlib.util
import io
import os
import sys
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, TracebackType

__all__ = ["Ending", "Program", "load_module", "load_script"]


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """How a program ended.

    Args:
        code: Exit code Python would have given.
        error: What it raised; None after a plain end or `SystemExit`.
    """

    code: int
    error: BaseException | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """Something that can be run as `__main__`.

    Args:
        code: Compiled.
        file: Where it stands, as Python tells it: a whole path, which a change of folder leaves so.
        called: What Python puts into `sys.argv[0]`.
        first_path: What Python puts in front of `sys.path`.
        own: Folders that are the user's although they may lie among the libraries.
        spec: Of a module; None for a script.
    """

    code: CodeType
    file: str
    called: str
    first_path: str
    own: tuple[str, ...]
    spec: importlib.machinery.ModuleSpec | None = None

    def run(self, arguments: Sequence[str]) -> Ending:
        """Run it with its own `sys.argv`, `sys.path` and `__main__`.

        What it raises is shown as Python shows it, without the lines that led here.

        Args:
            arguments: Those of the program.
        """
        module = types.ModuleType("__main__")
        module.__file__ = self.file
        module.__spec__ = self.spec
        # The module, which `__main__` alone has; all others, this one too, have its dict.
        module.__builtins__ = builtins  # type: ignore[attr-defined]
        module.__annotations__ = {}
        module.__cached__ = None if self.spec is None else self.spec.cached  # type: ignore[attr-defined]
        if self.spec is None:
            module.__loader__ = SourceFileLoader("__main__", self.file)
        else:
            module.__package__ = self.spec.parent
            module.__loader__ = self.spec.loader
        # It stays `__main__` after its end: what it registered to run at exit looks its names up.
        sys.modules["__main__"] = module
        sys.argv[:] = [self.called, *arguments]
        sys.path[0] = self.first_path
        try:
            exec(self.code, module.__dict__)
        except SystemExit as end:
            return Ending(_code_of(end))
        except BaseException as error:  # noqa: BLE001 - shown as usual, and findings are reported
            trace = error.__traceback__
            error.__traceback__ = _from_program(trace)
            sys.excepthook(type(error), error, error.__traceback__)
            return Ending(130 if isinstance(error, KeyboardInterrupt) else 1, error)
        return Ending(0)


def load_script(path: str) -> Program:
    """Read a script.

    Args:
        path: The file.

    Raises:
        OSError: It cannot be read.
        SyntaxError: It is not Python.
    """
    whole = str(Path(path).absolute())
    with io.open_code(path) as file:
        text = file.read()
    try:
        # Else the script would inherit the `annotations` of this file.
        code = compile(text, whole, "exec", dont_inherit=True)
    except SyntaxError as error:
        error.filename = path
        raise
    folder = str(Path(path).resolve().parent)
    return Program(code, whole, path, folder, (whole,))


def load_module(name: str) -> Program:
    """Find a module, as `python -m` does.

    Args:
        name: Dotted; of a package, its `__main__` is meant.

    Raises:
        ModuleNotFoundError: There is none of that name, or it cannot be run.
    """
    sys.path.insert(1, os.getcwd())  # noqa: PTH109 - as Python does, links and all
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    finally:
        del sys.path[1]
    get_code = getattr(None if spec is None else spec.loader, "get_code", None)
    code = None if spec is None or get_code is None else get_code(spec.name)
    if spec is None or code is None or spec.origin is None:
        raise ModuleNotFoundError(f"no module `{name}` that could be run as `python -m {name}`")
    top = Path(spec.origin).parents[spec.name.count(".")] / spec.name.partition(".")[0]
    own = (spec.origin, str(top))
    return Program(code, spec.origin, spec.origin, os.getcwd(), own, spec)  # noqa: PTH109


def _code_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    sys.stderr.write(f"{end.code}\n")
    return 1


def _from_program(trace: TracebackType | None) -> TracebackType | None:
    """Leave out this file's own line."""
    return None if trace is None else trace.tb_next
