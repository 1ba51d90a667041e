"""Scripts that are run and watched inside the process of a test."""

import contextlib
import io
import linecache
import os
import warnings
from pathlib import Path

from midstep.auditing.checks import check
from midstep.auditing.events import Recording
from midstep.auditing.recorder.watching import watch
from midstep.defects import SETUP
from midstep.findings import Finding


def record(path: Path, text: str) -> Recording:
    """Write a script, run it, and give what the recorder wrote down.

    What the script raises ends it and nothing else, as it does in a process of its own.
    """
    path.write_text(text, encoding="utf-8")
    linecache.checkcache(str(path))
    is_complete = False
    before = Path.cwd()
    with (
        watch(find_optimizers=False) as recorder,
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        os.chdir(path.parent)
        try:
            exec(compile(text, str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})
            is_complete = True
        except SystemExit as end:
            is_complete = not end.code
        except (RuntimeError, AssertionError, ValueError):
            pass
        finally:
            os.chdir(before)
        recording = recorder.recording(is_complete=is_complete)  # before it lets go, as the command
    assert recording.num_unmeasured == 0 or "meta" in text
    return recording


def find_in(path: Path, text: str) -> list[Finding]:
    """The findings in a script."""
    return check([record(path, text)])


def codes(found: list[Finding], *, advice: bool = False) -> list[str]:
    """The codes of findings, as they are reported without or with advice."""
    return [f.defect.code for f in found if advice or f.level != "advice"]


def loop(body: str) -> str:
    """A script of the catalogue's loader, model and optimizer, and a body."""
    return f"{SETUP}\n{body}"
