"""A finding: what was seen in a run, with its figures and where to look; and all of them."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Finding", "Judgement"]

_WIDTH = 100


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was seen, and no more than the record shows.

    Attributes:
        rule: Its name, the same in every run.
        title: What was seen, in a few words.
        seen: The evidence, in figures.
        look: Where to look, or what to do.
        figures: The figures by name, for programs.
        updates: The first and the last update that it is about.
    """

    rule: str
    title: str
    seen: str
    look: str
    figures: Mapping[str, float | str]
    updates: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        """Give it in plain values."""
        return dataclasses.asdict(self) | {"updates": list(self.updates)}

    def lines(self) -> list[str]:
        """Put it in words: a title, the evidence, and where to look."""
        return [
            f"- {self.title}",
            *_wrapped(self.seen),
            *_wrapped(f"Look at: {self.look}"),
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict on a run.

    Attributes:
        run: Its name.
        num_updates: How many it is about.
        findings: What was found; empty for a run that is clean as far as its log shows.
        facts: What the run comes to, fact by fact, whether anything was found or not.
        not_judged: What the log holds too little for, by rule.
    """

    run: str
    num_updates: int
    findings: Sequence[Finding]
    facts: Mapping[str, str]
    not_judged: Mapping[str, str]

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        updates = f"{self.num_updates:,} update{'' if self.num_updates == 1 else 's'}"
        if not self.findings:
            return f"{self.run}: nothing found in {updates}"
        number = len(self.findings)
        return f"{self.run}: {number} finding{'' if number == 1 else 's'} in {updates}"

    def lines(self) -> list[str]:
        """Put it in words; a clean run is one line."""
        return [self.headline, *(line for finding in self.findings for line in finding.lines())]

    def to_json(self) -> dict[str, Any]:
        """Give it in plain values."""
        return {
            "run": self.run,
            "updates": self.num_updates,
            "findings": [finding.to_json() for finding in self.findings],
            "facts": dict(self.facts),
            "not_judged": dict(self.not_judged),
        }


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")
