"""`midstep.audit`: watch a block of code, and have its defects afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..findings import Finding, Format, Selection, Suppressions, once, render
from .checks import check
from .events import Recording

__all__ = ["Audit", "audit", "judge"]


@dataclasses.dataclass(slots=True)
class Audit:
    """What an audit found; empty until its block has ended.

    Args:
        findings: Each defect once a line, in order of the lines.
        num_updates: Steps that were watched.
    """

    findings: list[Finding] = dataclasses.field(default_factory=list)
    num_updates: int = 0

    def __str__(self) -> str:
        return render(self.findings, Format.TEXT, tool="audit", version="")


@contextlib.contextmanager
def audit(
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    advice: bool = False,
    windows: int | None = None,
) -> Iterator[Audit]:
    """Watch a training loop from outside, and say what is wrong with it.

    Changes nothing: the same random streams, the same results bit for bit. Costs two attribute
    reads a parameter and backward, and at first a few values of `.grad`; torch is as it was when
    the block ends, also by an exception, which goes on its way.

    Args:
        select: Codes, starts of codes or names of defects; empty for all.
        ignore: The same, for those that are left out.
        advice: Report advice, too.
        windows: Steps to watch, of all optimizers together; None for all.

    Returns:
        A context that gives an `Audit`, filled when the block has ended.

    Raises:
        ValueError: A pattern that names no defect, or no step to watch.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with audit() as found:
        ...     for _ in range(3):
        ...         model(torch.ones(4, 2)).mean().backward()
        ...         optimizer.step()
        >>> [finding.defect.name for finding in found.findings]
        ['zero-grad-missing']
    """
    selection = Selection(tuple(select), tuple(ignore), advice)
    if windows is not None and windows < 1:
        raise ValueError(f"`audit(windows={windows})`: must be at least 1, or nothing is watched.")
    from .recorder.watching import watch

    found, is_complete = Audit(), False
    with watch(max_updates=windows) as recorder:
        try:
            yield found
            is_complete = True
        finally:
            recording = recorder.recording(is_complete=is_complete)
            found.findings = judge([recording], selection)
            found.num_updates = recorder.num_updates


def judge(
    recordings: Sequence[Recording], selection: Selection, here: Path | None = None
) -> list[Finding]:
    """Find the defects that are to be reported, with paths as short as they can be.

    Args:
        recordings: One for each process.
        selection: Which of them.
        here: The folder that paths are told from; None for the one the process is in.
    """
    here = Path.cwd() if here is None else here
    findings = selection.of(check(recordings))
    texts: dict[str, Suppressions] = {}
    for finding in findings:
        if finding.path not in texts:
            try:
                text = Path(finding.path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                text = ""
            texts[finding.path] = Suppressions(text)
    kept = [finding for finding in findings if not texts[finding.path].hides(finding)]
    # Processes may name one file in several ways.
    return once(dataclasses.replace(finding, path=_short(finding.path, here)) for finding in kept)


def _short(path: str, here: Path) -> str:
    whole = Path(path)
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else path
